"""The one configuration of a run: flat, frozen, checked when it is made.

Field names are the command-line flags. Units are in the names or in the comment of the field.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path

from rft_trainer.config.algorithm import AlgorithmOptions
from rft_trainer.config.critic import CriticOptions
from rft_trainer.config.data import DataOptions
from rft_trainer.config.distribution import DistributionOptions
from rft_trainer.config.evaluation import EvaluationOptions
from rft_trainer.config.lora import LARGEST_VLLM_RANK, LoRAOptions
from rft_trainer.config.mismatch import MismatchOptions
from rft_trainer.config.optimizer import OptimizerOptions
from rft_trainer.config.plan import PlanOptions
from rft_trainer.config.residency import ResidencyOptions
from rft_trainer.config.reward import RewardOptions
from rft_trainer.config.rollout import RolloutOptions
from rft_trainer.config.run import RunOptions
from rft_trainer.config.sampling import SamplingOptions
from rft_trainer.config.warm_start import WarmStartOptions
from rft_trainer.errors import InvalidSettings
from rft_trainer.optim import AdamWConfig, ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What a backend builds an optimiser from; `max_norm` 0 means that gradients are never clipped."""

    adamw: AdamWConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    max_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RFTConfig(
    RunOptions,
    OptimizerOptions,
    LoRAOptions,
    WarmStartOptions,
    AlgorithmOptions,
    RewardOptions,
    CriticOptions,
    MismatchOptions,
    SamplingOptions,
    RolloutOptions,
    ResidencyOptions,
    PlanOptions,
    DistributionOptions,
    EvaluationOptions,
    DataOptions,
):
    """Every setting of a run. Raises ConfigurationError naming field, value and remedy."""

    def __post_init__(self) -> None:
        problems = [
            *self._data_problems(),
            *self._evaluation_problems(),
            *self._rollout_problems(),
            *self._algorithm_problems(),
            *self._reward_problems(),
            *self._sampling_problems(),
            *self._critic_problems(),
            *self._mismatch_problems(),
            *self._optimizer_problems(),
            *self._lora_problems(),
            *self._warm_start_problems(),
            *self._plan_problems(),
            *self._distribution_problems(),
            *self._run_problems(),
            *self._batch_problems(),
            *self._adapter_problems(),
        ]
        if self.train_batch_size is None or self.train_batch_size >= 1:
            try:
                self.actor_optimizer()
            except ValueError as problem:
                problems.append(str(problem))
        if problems:
            raise InvalidSettings("\n".join(problems), self)

    def _batch_problems(self) -> list[str]:
        samples = self.samples_per_step
        if self.train_batch_size is not None and self.train_batch_size >= 1 and samples % self.train_batch_size:
            return [
                f"train_batch_size is {self.train_batch_size}, which does not divide the {samples} responses of a step "
                f"(rollout_batch_size {self.rollout_batch_size} x n_samples_per_prompt {self.n_samples_per_prompt}): "
                "choose a divisor"
            ]
        if 0 < self.max_steps <= self.critic_warmup_steps:
            return [
                f"critic_warmup_steps is {self.critic_warmup_steps} and max_steps is {self.max_steps}: the actor would "
                "never be trained; raise max_steps"
            ]
        return []

    def _adapter_problems(self) -> list[str]:
        if self.lora_rank and self.freeze:
            return [
                f"freeze is {list(self.freeze)} and lora_rank is {self.lora_rank}: adapters freeze all weights; "
                "leave out freeze, and choose the adapted layers by lora_targets"
            ]
        return []

    @property
    def sends_adapter_only(self) -> bool:
        """Whether a weight update sends the adapter, and the engine keeps the weights below it."""
        if self.lora_rank == 0 or self.lora_sync == "merged":
            return False
        return self.lora_sync == "adapter" or (self.engine_type == "vllm" and self.lora_rank <= LARGEST_VLLM_RANK)

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps after one rollout."""
        if self.train_batch_size is None:
            return self.max_epochs
        return self.max_epochs * (self.samples_per_step // self.train_batch_size)

    def actor_optimizer(self) -> OptimizerConfig:
        """The part that the actor's optimiser is built from."""
        return self._optimizer(self.actor_learning_rate, self.max_steps - self.critic_warmup_steps)

    def warm_start_optimizer(self, total_steps: int | None) -> OptimizerConfig:
        """The part that the optimiser of the supervised steps is built from; None: their number is not known yet."""
        return OptimizerConfig(
            adamw=AdamWConfig(lr=self.warm_start_learning_rate, betas=self.adam_betas, weight_decay=self.weight_decay),
            schedule=ScheduleConfig(
                kind="constant" if total_steps is None else self.warm_start_lr_scheduler,
                warmup_steps=self.warm_start_lr_warmup_steps,
                total_steps=total_steps,
                min_ratio=self.warm_start_lr_min_ratio,
            ),
            max_norm=self.max_norm,
        )

    def critic_optimizer(self) -> OptimizerConfig:
        """The part that the critic's optimiser is built from: its own rate, the rest as the actor's."""
        return self._optimizer(self.critic_learning_rate, self.max_steps)

    def _optimizer(self, rate: float, steps: int) -> OptimizerConfig:
        # With no round at all nothing is stepped, and any length will do.
        idle = self.max_steps == 0
        return OptimizerConfig(
            adamw=AdamWConfig(lr=rate, betas=self.adam_betas, weight_decay=self.weight_decay),
            schedule=ScheduleConfig(
                kind=self.lr_scheduler,
                warmup_steps=0 if idle else self.lr_warmup_steps,
                total_steps=1 if idle else steps * self.updates_per_step,
            ),
            max_norm=self.max_norm,
        )

    def as_dict(self) -> dict[str, object]:
        """Plain values for a JSON file, in declaration order."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: str(v) if isinstance(v, Path) else list(v) if isinstance(v, tuple) else v for k, v in values.items()}
