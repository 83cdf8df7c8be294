"""Which checkpoints stay: decided from their facts alone, before anything is removed."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A complete checkpoint on the disk; `score` is None when the metric was not measured at its step."""

    name: str
    bytes: int
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Limits of what is kept. The newest checkpoint and the best one always stay, also beyond the limits.

    Attributes:
        count: checkpoints that stay; 0 keeps all.
        bytes: bytes that they may take together; 0 has no limit.
        metric: evaluation metric of the best checkpoint; None: none is the best.
        lowest: the smallest value of the metric is the best.
    """

    count: int = 0
    bytes: int = 0
    metric: str | None = None
    lowest: bool = False

    def best(self, stored: Sequence[Stored]) -> Stored | None:
        """The best one; of equals the newest. None when no checkpoint has a score."""
        scored = [(item.score, place, item) for place, item in enumerate(stored) if item.score is not None]
        if not scored:
            return None
        sign = -1 if self.lowest else 1
        return max(scored, key=lambda entry: (sign * entry[0], entry[1]))[2]

    def removed(self, stored: Sequence[Stored]) -> list[Stored]:
        """What goes, oldest first; `stored` is in order of age, the newest last."""
        best = self.best(stored)
        total = sum(item.bytes for item in stored)
        count = len(stored)
        gone: list[Stored] = []
        for item in stored[:-1]:
            too_many = self.count > 0 and count > self.count
            too_large = self.bytes > 0 and total > self.bytes
            if not too_many and not too_large:
                break
            if item == best:
                continue
            gone.append(item)
            count -= 1
            total -= item.bytes
        return gone
