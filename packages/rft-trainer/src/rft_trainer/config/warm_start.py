"""Supervised steps on the gold answers before reinforcement."""

from dataclasses import dataclass

from rft_trainer.config.ranges import below
from rft_trainer.optim import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class WarmStartOptions:
    """Supervised steps on the gold answers before reinforcement."""

    warm_start_epochs: int = 0
    """Passes over the gold answers of the training set before reinforcement; 0: none."""
    warm_start_steps: int | None = None
    """Exactly so many optimiser steps on the gold answers, instead of whole epochs."""
    warm_start_seconds: float | None = None
    """About so many seconds on the gold answers, instead of epochs; the pace of the first steps fixes their number."""
    warm_start_learning_rate: float = 3e-4
    """Peak learning rate of the supervised steps."""
    warm_start_lr_scheduler: str = "cosine"
    """constant, linear or cosine, over the supervised steps."""
    warm_start_lr_warmup_steps: int = 0
    """Supervised steps of warm-up."""
    warm_start_lr_min_ratio: float = 0.1
    """Share of the peak rate that is left at the last supervised step."""
    warm_start_batch_size: int = 64
    """Answers per supervised step, over all ranks."""
    warm_start_micro_batch_size: int = 16
    """Answers per forward and backward on one rank."""
    warm_start_max_tokens: int | None = None
    """Token budget of a supervised micro-batch instead of a count of answers."""
    warm_start_packing: bool = False
    """Lay the answers of a supervised micro-batch end to end, without padding: same numbers."""

    def _warm_start_problems(self) -> list[str]:
        problems = below(
            self,
            1,
            "warm_start_steps",
            "warm_start_batch_size",
            "warm_start_micro_batch_size",
            "warm_start_max_tokens",
        ) + below(self, 0, "warm_start_epochs", "warm_start_learning_rate", "warm_start_lr_warmup_steps")
        if self.warm_start_seconds is not None and not self.warm_start_seconds > 0:
            problems.append(f"warm_start_seconds is {self.warm_start_seconds}: give more than 0, or leave it out")
        lengths = {
            "warm_start_epochs": self.warm_start_epochs or None,
            "warm_start_steps": self.warm_start_steps,
            "warm_start_seconds": self.warm_start_seconds,
        }
        given = [f"{name} {value}" for name, value in lengths.items() if value is not None]
        if len(given) > 1:
            problems.append(f"{' and '.join(given)}: a warm start has one length; leave all but one of them out")
        try:
            # The real length is known when the data are; the kind of schedule and its share are checked now.
            ScheduleConfig(
                kind=self.warm_start_lr_scheduler,
                min_ratio=self.warm_start_lr_min_ratio,
                total_steps=1,
            )
        except ValueError as problem:
            problems.append(f"warm_start_lr_scheduler and warm_start_lr_min_ratio: {problem}")
        return problems

    @property
    def warm_starts(self) -> bool:
        """Whether supervised steps come before reinforcement."""
        return self.warm_start_epochs > 0 or self.warm_start_steps is not None or self.warm_start_seconds is not None

    @property
    def warm_start_layout(self) -> str:
        """Name of the layout of a supervised micro-batch."""
        return "packed" if self.warm_start_packing else "right"
