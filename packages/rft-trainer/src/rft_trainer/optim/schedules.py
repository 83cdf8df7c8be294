"""Learning-rate schedules, counted in optimiser steps (never in micro-batches)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rft_trainer.errors import ConfigurationError

SCHEDULES: tuple[str, ...] = ("constant", "cosine", "linear")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Warm-up and decay of the learning rate.

    Attributes:
        kind: "constant", "linear" or "cosine" after the warm-up.
        warmup_steps: optimiser steps; step k of them (from 1) uses k / warmup_steps of the rate.
        total_steps: optimiser steps of the run, the end of the decay; not read by "constant".
        min_ratio: share of the rate that is left at and after `total_steps`.
    """

    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ConfigurationError(f"schedule {self.kind!r} is not known; choose one of {', '.join(SCHEDULES)}")
        if self.warmup_steps < 0 or not 0 <= self.min_ratio <= 1:
            raise ConfigurationError(
                f"warmup_steps must not be negative and min_ratio lie in [0, 1], got warmup_steps {self.warmup_steps}, "
                f"min_ratio {self.min_ratio}"
            )
        if self.kind != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ConfigurationError(
                f"schedule {self.kind!r} needs total_steps beyond the warm-up, got total_steps {self.total_steps}, "
                f"warmup_steps {self.warmup_steps}"
            )

    def ratio(self, finished_steps: int) -> float:
        """Share of the rate that the next optimiser step uses, after `finished_steps` of them."""
        if finished_steps < self.warmup_steps:
            return (finished_steps + 1) / self.warmup_steps
        if self.total_steps is None or self.kind == "constant":
            return 1.0
        progress = min((finished_steps - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        left = 1 - progress if self.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.min_ratio + (1 - self.min_ratio) * left


def build_schedule(optimizer: Optimizer, config: ScheduleConfig) -> LambdaLR:
    """A torch scheduler; call `step()` once after each optimiser step that was taken.

    Its state holds the number of finished steps; loading it into a fresh one continues where it stopped.
    """
    return LambdaLR(optimizer, config.ratio)


def reschedule(scheduler: LambdaLR, config: ScheduleConfig) -> None:
    """Go on with another schedule from the next step on; the number of finished steps stays.

    The rate of the next optimiser step is set by the last `step()`, so it is still the old schedule's.
    """
    scheduler.lr_lambdas = [config.ratio] * len(scheduler.lr_lambdas)
