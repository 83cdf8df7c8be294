"""The gloo twin of one set of ranks, over which they compare what each is about to call."""

import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from rft_dist.exchange import bytes_tensor, tensor_bytes

_TEXT_BYTES = 2048


class BrokenConnection(Exception):  # noqa: N818 - it is caught inside the guard and never seen as an error
    """A member's connection is gone, which mostly means that its process has died. Never leaves the guard."""


class Comparison:
    """One exchange of fingerprints under way."""

    def __init__(self, gloo: Any, mine: list[int], size: int) -> None:
        row = torch.tensor(mine, dtype=torch.int64)
        self._gloo = gloo
        self._results = [torch.empty_like(row) for _ in range(size)]
        self._work = gloo.allgather([self._results], [row])

    def wait(self, seconds: float) -> bool:
        """Waits; False when a rank has not come yet.

        Raises:
            BrokenConnection: a member's connection is gone.
        """
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError as failure:
            if self._work.is_completed():
                raise BrokenConnection(str(failure)) from failure
            return False
        return True

    def rows(self) -> list[list[int]]:
        """Of each member, by position, once `wait` has returned True."""
        return [result.tolist() for result in self._results]

    def abandon(self) -> None:
        """Leaves an exchange that nobody will finish to a daemon thread: gloo's own end would wait for its time-out."""
        threading.Thread(target=self._outlast, name="rft-dist-guard-abandoned", daemon=True).start()

    def _outlast(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._work.wait()


class Channel:
    """Compares calls among fixed ranks. Its gloo group belongs to no registry: torch and the user never see it.

    Attributes:
        calls: how many collectives each member had come to in all, when it came to the last common one; by position.
        last: that common one in words.
    """

    def __init__(self, store: Store, ranks: tuple[int, ...], position: int, timeout_seconds: float) -> None:
        """Connects the members. Collective over the ranks."""
        self.ranks = ranks
        self.calls: list[int] = [0] * len(ranks)
        self.last = ""
        self._gloo: Any = dist.ProcessGroupGloo(store, position, len(ranks), timedelta(seconds=timeout_seconds))

    def compare(self, fingerprint: int, calls: int) -> Comparison:
        """Starts an exchange of fingerprints and numbers of calls. Collective over the ranks."""
        return Comparison(self._gloo, [fingerprint, calls], len(self.ranks))

    def calls_of(self, rank: int) -> int:
        """How many collectives the rank had come to, when it came to the last common one; 0 for a stranger."""
        return self.calls[self.ranks.index(rank)] if rank in self.ranks else 0

    def texts(self, text: str) -> list[str]:
        """Every member's text, cut to a fixed size. Collective over the ranks."""
        mine = bytes_tensor(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), torch.device("cpu"))
        results = [torch.empty_like(mine) for _ in self.ranks]
        self._gloo.allgather([results], [mine]).wait()
        return [tensor_bytes(result).rstrip(b"\0").decode(errors="replace") for result in results]
