"""The critic of estimators that need one, and the teacher of distillation."""

from dataclasses import dataclass

from rft_trainer.config.ranges import below


@dataclass(frozen=True, kw_only=True)
class CriticOptions:
    """The critic of estimators that need one, and the teacher of distillation."""

    critic_pretrain: str | None = None
    """Checkpoint that the critic starts from; none: `pretrain`."""
    critic_learning_rate: float = 9e-6
    """Peak learning rate of the critic."""
    critic_warmup_steps: int = 0
    """First steps in which the critic learns and the actor waits."""
    value_clip: float | None = 0.2
    """Largest move of a value from its old one that the loss rewards; none: no clip."""
    teacher: str | None = None
    """Checkpoint of the teacher of on_policy_distillation; its tokenizer must be that of `pretrain`."""
    distillation_coef: float = 1.0
    """Weight of the teacher's term."""

    def _critic_problems(self) -> list[str]:
        problems = below(self, 0, "critic_learning_rate", "critic_warmup_steps", "distillation_coef")
        if self.value_clip is not None and self.value_clip <= 0:
            problems.append(f"value_clip is {self.value_clip}: give a number above 0, or none")
        return problems
