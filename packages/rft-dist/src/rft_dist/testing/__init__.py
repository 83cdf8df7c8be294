"""Running a function on real ranks, for tests."""

from rft_dist.testing.ranks import preload, run_ranks

__all__ = ["preload", "run_ranks"]
