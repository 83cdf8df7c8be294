"""Memory an engine holds while it sleeps, round by round."""

import logging
from collections.abc import Mapping

import torch

logger = logging.getLogger(__name__)

_MIB = 1 << 20


class SleepMemory:
    """Logs what is in use after each sleep and warns, with the owner, when it grows.

    The first round is left out of the comparison: engines allocate workspaces in it that stay.
    """

    def __init__(self, *, limit_bytes: int = 64 * _MIB) -> None:
        if limit_bytes < 0:
            raise ValueError(f"SleepMemory limit_bytes={limit_bytes}: give 0 or above")
        self._limit_bytes = limit_bytes
        self._baseline: dict[str, int] = {}
        self.rounds: list[dict[str, int]] = []

    def record(self, in_use: Mapping[str, int]) -> int:
        """Take the bytes in use by owner (the engine's own names); growth since round 2."""
        reading = dict(in_use)
        self.rounds.append(reading)
        logger.info(
            "sleep %d: %s MiB in use", len(self.rounds), {owner: size // _MIB for owner, size in reading.items()}
        )
        if len(self.rounds) <= 2:
            self._baseline = reading
            return 0
        growth = {owner: size - self._baseline.get(owner, 0) for owner, size in reading.items()}
        total = sum(growth.values())
        if total > self._limit_bytes:
            owner = max(growth, key=lambda name: growth[name])
            logger.warning(
                "memory in use during sleep grew by %d MiB since the second one (limit %d MiB), most of it %s (%d MiB)",
                total // _MIB, self._limit_bytes // _MIB, owner, growth[owner] // _MIB,
            )  # fmt: skip
        return total


def cuda_memory_in_use(*, given_back: int = 0) -> dict[str, int]:
    """Bytes of the current CUDA device in use, by owner.

    "torch tensors" are those of this process, "torch cache" what its allocator keeps beside them, "outside torch"
    everything else: CUDA contexts, workspaces, NCCL and other processes.

    Args:
        given_back: bytes that torch's allocator counts as its own although a sleeping engine has given them back.
    """
    free, total = torch.cuda.mem_get_info()
    allocated = max(torch.cuda.memory_allocated() - given_back, 0)
    reserved = max(torch.cuda.memory_reserved() - given_back, allocated)
    return {
        "torch tensors": allocated,
        "torch cache": reserved - allocated,
        "outside torch": max(total - free - reserved, 0),
    }
