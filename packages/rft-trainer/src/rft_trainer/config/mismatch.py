"""What is done about the gap between the engine that sampled and the trainer that learns."""

from dataclasses import dataclass
from typing import Literal

from rft_trainer.algorithms import MismatchLimit


@dataclass(frozen=True, kw_only=True)
class MismatchOptions:
    """What is done about the gap between the engine that sampled and the trainer that learns."""

    importance_sampling: Literal["off", "truncate", "mask"] = "off"
    """Weigh the loss by p_trainer / p_engine: truncate bounds the weight, mask drops what lies outside the bounds."""
    importance_level: Literal["token", "sequence"] = "token"
    """A weight per token, or the product over the response on each of its tokens."""
    importance_cap: float = 2.0
    """Largest weight."""
    importance_floor: float = 0.0
    """Smallest weight that mask keeps."""
    gap_warn: float | None = 0.05
    """Mean |log p_trainer - log p_engine| in nats above which a step warns; none: never."""
    gap_stop: float | None = None
    """The same above which the run stops; none: never."""

    def _mismatch_problems(self) -> list[str]:
        problems = []
        if not 0 <= self.importance_floor < self.importance_cap:
            problems.append(
                f"importance_floor is {self.importance_floor} and importance_cap is {self.importance_cap}: "
                "give 0 <= floor < cap"
            )
        if self.importance_floor > 0 and self.importance_sampling != "mask":
            problems.append(
                f"importance_floor {self.importance_floor} and importance_sampling {self.importance_sampling!r}: only "
                "'mask' reads a floor"
            )
        try:
            self.gap_limit()
        except ValueError as problem:
            problems.append(f"gap_warn and gap_stop: {problem}")
        return problems

    def gap_limit(self) -> MismatchLimit:
        """The bounds on the gap."""
        return MismatchLimit(warn=self.gap_warn, stop=self.gap_stop)
