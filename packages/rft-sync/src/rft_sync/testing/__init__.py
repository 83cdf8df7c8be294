"""Tools to test sources, receivers and trainers that use them."""

from rft_sync.testing.ranks import RankError, spawn_ranks

__all__ = ["RankError", "spawn_ranks"]
