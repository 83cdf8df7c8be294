"""Tools to test sources, receivers and trainers that use them."""

from rft_sync.testing.conformance import ConformanceError, check_receiver, check_source
from rft_sync.testing.ranks import RankError, spawn_ranks

__all__ = ["ConformanceError", "RankError", "check_receiver", "check_source", "spawn_ranks"]
