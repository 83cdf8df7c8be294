"""The policy update: mini-batches of a rollout, micro-batches of a mini-batch, one denominator for all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rft_dist import Max, Mean, Sum
from rft_trainer.algorithms import (
    LossInputs,
    LossOptions,
    MetricMax,
    MetricSum,
    PolicyLoss,
    aggregate,
    kl_loss,
    loss_denominator,
    metric_mean,
    mismatch_metrics,
)
from rft_trainer.experience.experience import Collator, Experience, ExperienceBatch
from rft_trainer.experience.maker import placeholder
from rft_trainer.experience.micro_batches import MicroBatchPlanner
from rft_trainer.experience.replay_buffer import ReplayBuffer
from rft_trainer.models.padding import right_pad
from rft_trainer.strategy.protocols import DataParallel, StepReport, TrainingBackend, TrainState

Metric = Mean | Max | Sum | float


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """Numbers of the update.

    mini_batch_size: responses of this rank per optimiser step.
    keep_groups: mini-batches hold whole groups.
    fixed_length: divisor of the fixed-length aggregation, None for the others.
    kl_coef: weight of the KL term; 0: no reference is read.
    """

    policy_loss: str
    options: LossOptions
    aggregation: str
    fixed_length: int | None
    kl_coef: float
    kl_estimator: str
    epochs: int
    mini_batch_size: int
    keep_groups: bool
    seed: int


class PolicyUpdate:
    """Optimiser steps over one rollout.

    The loss of a mini-batch is one sum over all ranks and micro-batches divided by one global count, so the gradient
    does not depend on how the mini-batch is split.

    `on_step` is called after each optimiser step that was taken.
    """

    def __init__(
        self,
        config: UpdateConfig,
        *,
        backend: TrainingBackend,
        data: DataParallel,
        planner: MicroBatchPlanner,
        collator: Collator,
        on_step: Callable[[], None],
    ) -> None:
        self._config = config
        self._loss = PolicyLoss.get(config.policy_loss)
        self._backend = backend
        self._data = data
        self._planner = planner
        self._collate = collator
        self._on_step = on_step
        self._buffer: ReplayBuffer[Experience] = ReplayBuffer(seed=config.seed, keep_groups=config.keep_groups)

    def __call__(self, actor: TrainState, experiences: Sequence[Experience]) -> dict[str, Metric]:
        """Update the actor; metrics under `train/` that still want their reduction. Collective over the world."""
        collected = _Collector()
        actor.module.train()
        for mini_batch in self._mini_batches(experiences):
            report = self._one_step(actor, mini_batch, collected)
            collected.add_step(report)
            if not report.skipped:
                self._on_step()
        return collected.metrics(self._config.kl_coef)

    def state_dict(self) -> dict[str, int]:
        """What the shuffle of the next rollout depends on."""
        return self._buffer.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore what `state_dict` gave."""
        self._buffer.load_state_dict(state)

    def _mini_batches(self, experiences: Sequence[Experience]) -> list[list[Experience]]:
        """As many on every rank: one with fewer responses joins with empty ones. Collective over the world."""
        self._buffer.clear()
        self._buffer.extend(experiences)
        batches = list(self._buffer.mini_batches(self._config.mini_batch_size, self._config.epochs))
        return batches + [[] for _ in range(self._data.most(len(batches)) - len(batches))]

    def _one_step(self, actor: TrainState, mini_batch: list[Experience], collected: "_Collector") -> StepReport:
        batches = self._planner.plan(mini_batch)
        masks = [right_pad([mini_batch[i].response_mask for i in indices], 0)[0] for indices in batches if indices]
        local = sum((self._denominator(mask) for mask in masks), torch.zeros(()))
        # Before the first backward: every micro-batch on every rank divides by the same number.
        denominator = float(self._data.sum(local))
        for number, indices in enumerate(batches):
            rows = [mini_batch[i] for i in indices] or [placeholder(mini_batch)]
            loss = self._micro_batch(actor.module, self._collate(rows), denominator, collected)
            self._backend.backward(actor, loss, last=number == len(batches) - 1)
        return self._backend.optimizer_step(actor)

    def _denominator(self, mask: Tensor) -> Tensor:
        return loss_denominator(mask, self._config.aggregation, self._config.fixed_length)

    def _micro_batch(
        self, module: nn.Module, batch: ExperienceBatch, denominator: float, collected: "_Collector"
    ) -> Tensor:
        assert batch.advantages is not None
        scores = module(batch.layout)
        mask = batch.loss_mask
        outputs = self._loss(
            LossInputs(
                log_probs=scores.log_probs,
                old_log_probs=batch.old_log_probs,
                advantages=batch.advantages,
                mask=mask,
            ),
            self._config.options,
        )
        token_loss = outputs.loss
        behaviour = scores.log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        collected.add(outputs.metrics)
        collected.add(mismatch_metrics(behaviour, batch.engine_log_probs, mask), prefix="gap/")
        collected.add({"entropy": metric_mean(scores.entropy.detach(), mask)})
        if self._config.kl_coef > 0:
            assert batch.ref_log_probs is not None
            kl = kl_loss(scores.log_probs, batch.ref_log_probs, mask, kind=self._config.kl_estimator)
            collected.add({"kl": metric_mean(kl.detach(), mask)})
            token_loss = token_loss + self._config.kl_coef * kl
        loss = aggregate(token_loss, mask, self._config.aggregation, denominator)
        collected.add_loss(loss)
        return loss


class _Collector:
    """Sums of metrics over the micro-batches of one update."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._most: dict[str, float] = {}
        self._loss = 0.0
        self._steps: list[StepReport] = []

    def add(self, metrics: Mapping[str, MetricSum | MetricMax], prefix: str = "") -> None:
        """Detached numbers only: nothing here may keep a graph alive between micro-batches."""
        for name, metric in metrics.items():
            key = prefix + name
            if isinstance(metric, MetricMax):
                self._most[key] = max(self._most.get(key, -torch.inf), float(metric.value))
            else:
                total, count = self._sums.get(key, (0.0, 0.0))
                self._sums[key] = (total + float(metric.total), count + float(metric.count))

    def add_loss(self, loss: Tensor) -> None:
        self._loss += float(loss.detach())

    def add_step(self, report: StepReport) -> None:
        self._steps.append(report)

    def metrics(self, kl_coef: float) -> dict[str, Metric]:
        """Under `train/`; the loss is the mean over the update's steps of the global loss."""
        steps = len(self._steps)
        taken = [report for report in self._steps if not report.skipped]
        result: dict[str, Metric] = {f"train/{name}": Mean(*pair) for name, pair in self._sums.items()}
        result.update({f"train/{name}": Max(value) for name, value in self._most.items()})
        result["train/loss"] = Sum(self._loss / steps)
        result["train/updates"] = Max(float(len(taken)))
        result["train/skipped_updates"] = Max(float(steps - len(taken)))
        result["train/learning_rate"] = Max(self._steps[-1].learning_rate)
        result["train/kl_coef"] = Max(kl_coef)
        if taken:
            result["train/grad_norm"] = Max(sum(report.grad_norm for report in taken) / len(taken))
        return result
