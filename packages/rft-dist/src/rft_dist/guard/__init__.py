"""Checking collectives over the ranks before they run."""

from rft_dist.guard.guard import CollectiveGuard, collective_tag

__all__ = ["CollectiveGuard", "collective_tag"]
