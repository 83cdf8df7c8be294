"""Optimiser and learning rate."""

from dataclasses import dataclass

from rft_trainer.config.ranges import below


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Optimiser and learning rate."""

    actor_learning_rate: float = 1e-6
    """Peak learning rate."""
    weight_decay: float = 0.0
    """AdamW decay of matrices."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas."""
    max_norm: float = 1.0
    """Largest global gradient norm; 0: never clipped."""
    lr_scheduler: str = "constant"
    """constant, linear or cosine."""
    lr_warmup_steps: int = 0
    """Optimiser steps of warm-up."""
    freeze: tuple[str, ...] = ()
    """Prefixes of parameter names that stay fixed; each must match something."""
    ema_decay: float = 0.0
    """Decay of a moving average of the actor's weights, which is evaluated and exported in their place; 0: none."""
    adam_offload: bool = False
    """Optimiser state on the host: under ZeRO it is stepped there, under FSDP2 it is on the device in updates."""

    def _optimizer_problems(self) -> list[str]:
        problems = below(self, 0, "weight_decay", "max_norm", "actor_learning_rate", "lr_warmup_steps")
        if not 0 <= self.ema_decay < 1:
            problems.append(f"ema_decay is {self.ema_decay}: give a number of at least 0 and below 1")
        return problems
