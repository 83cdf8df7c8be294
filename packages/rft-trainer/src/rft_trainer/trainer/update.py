"""The update: mini-batches of a rollout, on each one step of the actor and one of the critic."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from rft_dist import Max
from rft_trainer.algorithms import (
    KLController,
    LossInputs,
    LossOptions,
    PolicyLoss,
    aggregate,
    entropy_bonus,
    expert_balance_loss,
    high_entropy_mask,
    importance_weights,
    kl_loss,
    metric_mean,
    mismatch_metrics,
    value_loss,
)
from rft_trainer.experience.experience import Collator, Experience, ExperienceBatch
from rft_trainer.experience.micro_batches import MicroBatchPlanner
from rft_trainer.experience.replay_buffer import ReplayBuffer
from rft_trainer.strategy.protocols import DataParallel, TrainingBackend, TrainState
from rft_trainer.trainer.collector import Metric, MetricCollector
from rft_trainer.trainer.kept_scores import KeptScores
from rft_trainer.trainer.steps import MiniBatchStep


@dataclass(frozen=True, kw_only=True)
class ImportanceConfig:
    """Weights p_trainer / p_engine on the loss; see `importance_weights`. mode "off" leaves the loss alone."""

    mode: str = "off"
    level: str = "token"
    cap: float = 2.0
    floor: float = 0.0


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """Numbers of the update.

    fixed_length: divisor of the fixed-length aggregation, None for the others.
    kl_estimator: kind of the divergence in the loss; None: none there, and no reference is read.
    entropy_coef: weight of the entropy bonus.
    high_entropy_ratio: share of each response's tokens that the policy loss keeps; all stay in the divisor.
    expert_balance_coef: weight of the load balance of experts.
    value_clip: of the critic's loss.
    replay_on_device: the responses of a step lie on the device during its update.
    train_batch_size: responses per optimiser step over all ranks; None: all of the step.
    keep_groups: mini-batches hold whole groups of group_size.
    """

    policy_loss: str
    options: LossOptions
    aggregation: str
    fixed_length: int | None
    kl_estimator: str | None
    importance: ImportanceConfig
    entropy_coef: float
    high_entropy_ratio: float
    expert_balance_coef: float
    value_clip: float | None
    epochs: int
    replay_on_device: bool
    train_batch_size: int | None
    keep_groups: bool
    group_size: int
    seed: int


class ExpertLoad(NamedTuple):
    """`counts` [E], how often each expert was chosen, on the device; `tokens`, times layers, that chose."""

    counts: Tensor
    tokens: float


def _balance(logits: Tensor, load: ExpertLoad) -> Tensor:
    """This micro-batch's part of the balance; choices were counted when the old log-probabilities were scored."""
    everywhere = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    return expert_balance_loss(logits, everywhere, load.counts, load.tokens)


class PolicyUpdate:
    """Optimiser steps over one rollout.

    kl: coefficient of the divergence in the loss.
    on_step: called after each optimiser step of the actor that was taken.
    """

    def __init__(
        self,
        config: UpdateConfig,
        *,
        backend: TrainingBackend,
        data: DataParallel,
        planner: MicroBatchPlanner,
        collator: Collator,
        kl: KLController,
        on_step: Callable[[], None],
    ) -> None:
        self._config = config
        self._loss = PolicyLoss.get(config.policy_loss)
        self._data = data
        self._kl = kl
        self._on_step = on_step
        self._buffer: ReplayBuffer[Experience] = ReplayBuffer(
            seed=config.seed, keep_groups=config.keep_groups, group_size=config.group_size
        )
        self._scores = KeptScores()
        step = partial(MiniBatchStep, backend=backend, data=data, planner=planner, collator=collator)
        self._actor_step = step(aggregation=config.aggregation, fixed_length=config.fixed_length)
        self._critic_step = step(aggregation="token-mean")

    def __call__(
        self,
        actor: TrainState,
        experiences: Sequence[Experience],
        *,
        critic: TrainState | None = None,
        critic_only: bool = False,
    ) -> dict[str, Metric]:
        """Update the models; metrics under `train/` that still want their reduction. Collective over the world.

        critic_only: the actor waits while the critic warms up.
        """
        for state in (actor, critic):
            if state is not None:
                state.module.train()
        try:
            return self._steps(actor, experiences, critic, critic_only)
        finally:
            # Copies on the device would stay there while the engine generates.
            self._buffer.release()

    def _steps(
        self, actor: TrainState, experiences: Sequence[Experience], critic: TrainState | None, critic_only: bool
    ) -> dict[str, Metric]:
        policy, value = MetricCollector("train/"), MetricCollector("train/critic/")
        for mini_batch in self._mini_batches(experiences):
            if not critic_only:
                micro_loss = partial(self._policy_micro_batch, policy, self._experts(actor, mini_batch))
                report = self._actor_step(actor, mini_batch, micro_loss)
                policy.add_step(report)
                if not report.skipped:
                    self._on_step()
            if critic is not None:
                value.add_step(self._critic_step(critic, mini_batch, partial(self._value_micro_batch, value)))
        self._settle_scores(experiences)
        metrics = {**policy.metrics(), "train/kl_coef": Max(self._kl.value)}
        return metrics if critic is None else {**metrics, **value.metrics()}

    def _settle_scores(self, experiences: Sequence[Experience]) -> None:
        self._scores.settle()
        for experience, trained in zip(experiences, self._buffer, strict=True):
            # On the device copies were trained on.
            experience.update_log_probs = trained.update_log_probs
            experience.update_entropies = trained.update_entropies

    def state_dict(self) -> dict[str, int]:
        """What the shuffle of the next rollout depends on."""
        return self._buffer.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore what `state_dict` gave."""
        self._buffer.load_state_dict(state)

    def _mini_batches(self, experiences: Sequence[Experience]) -> list[list[Experience]]:
        """As many on every rank in every epoch, whatever its share: one with fewer responses joins with empty ones.

        Collective over the world.
        """
        self._buffer.clear()
        config = self._config
        self._buffer.extend([e.to(self._data.device) for e in experiences] if config.replay_on_device else experiences)
        total = int(self._data.sum(torch.tensor(len(experiences))))
        count = 1 if config.train_batch_size is None else max(1, math.ceil(total / config.train_batch_size))
        size = max(1, math.ceil(len(experiences) / count))
        if config.keep_groups:
            size = math.ceil(size / config.group_size) * config.group_size
        batches = list(self._buffer.mini_batches(size, config.epochs))
        per_epoch = len(batches) // config.epochs
        most = self._data.most(per_epoch)
        # Behind the first step the present forward is no longer the policy that was rolled out.
        assert most * config.epochs < 2 or all(e.old_log_probs is not None for e in experiences)
        return [
            batches[epoch * per_epoch + number] if number < per_epoch else []
            for epoch in range(config.epochs)
            for number in range(most)
        ]

    def _policy_micro_batch(
        self,
        collected: MetricCollector,
        experts: ExpertLoad | None,
        module: Any,
        batch: ExperienceBatch,
        denominator: float,
    ) -> Tensor:
        assert batch.advantages is not None
        config, mask = self._config, batch.loss_mask
        scores = module(batch.layout, with_experts=experts is not None)
        behaviour = scores.log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        outputs = self._loss(
            LossInputs(
                log_probs=scores.log_probs,
                old_log_probs=batch.old_log_probs,
                advantages=batch.advantages,
                mask=mask,
                weights=self._weights(collected, behaviour, scores.entropy.detach(), batch),
            ),
            config.options,
        )
        token_loss = outputs.loss
        collected.add(outputs.metrics)
        collected.add(mismatch_metrics(behaviour, batch.engine_log_probs, mask), "gap/")
        collected.add({"entropy": metric_mean(scores.entropy.detach(), mask)})
        self._scores.note(batch.rows, scores.log_probs, scores.entropy)
        if config.entropy_coef > 0:
            token_loss = token_loss + entropy_bonus(scores.entropy, mask, config.entropy_coef)
        if config.kl_estimator is not None:
            assert batch.ref_log_probs is not None
            kl = kl_loss(scores.log_probs, batch.ref_log_probs, mask, kind=config.kl_estimator)
            collected.add({"kl": metric_mean(kl.detach(), mask)})
            token_loss = token_loss + self._kl.value * kl
        loss = aggregate(token_loss, mask, config.aggregation, denominator)
        if experts is not None:
            loss = loss + config.expert_balance_coef * _balance(scores.router_logits, experts)
        collected.add_loss(loss)
        return loss

    def _experts(self, actor: TrainState, mini_batch: Sequence[Experience]) -> ExpertLoad | None:
        """How often each expert was chosen in the mini-batch. Collective over the world."""
        if self._config.expert_balance_coef == 0:
            return None
        count, chosen_per_token = cast(Any, actor.network).experts
        total = torch.zeros(count, dtype=torch.float64)
        for experience in mini_batch:
            assert experience.expert_counts is not None
            total += experience.expert_counts
        total = self._data.sum(total)
        return ExpertLoad(total.float().to(self._data.device), float(total.sum()) / chosen_per_token)

    def _weights(
        self, collected: MetricCollector, behaviour: Tensor, entropy: Tensor, batch: ExperienceBatch
    ) -> Tensor | None:
        """Factors on the policy loss, [B, T]; None for ones. The divisor stays that of all trained tokens."""
        config, mask, weights = self._config, batch.loss_mask, None
        if config.importance.mode != "off":
            numbers = config.importance
            weights = importance_weights(
                behaviour,
                batch.engine_log_probs,
                mask,
                level=numbers.level,
                cap=numbers.cap,
                floor=numbers.floor,
                mode=numbers.mode,
            )
            collected.add({"importance_weight": metric_mean(weights, mask)})
        if config.high_entropy_ratio < 1:
            chosen = high_entropy_mask(entropy, mask, config.high_entropy_ratio).float()
            collected.add({"high_entropy_tokens": metric_mean(chosen, mask)})
            weights = chosen if weights is None else weights * chosen
        return weights

    def _value_micro_batch(
        self, collected: MetricCollector, module: Any, batch: ExperienceBatch, denominator: float
    ) -> Tensor:
        assert batch.values is not None
        assert batch.returns is not None
        values = module(batch.layout).values
        outputs = value_loss(values, batch.values, batch.returns, batch.loss_mask, clip=self._config.value_clip)
        collected.add(outputs.metrics)
        loss = aggregate(outputs.loss, batch.loss_mask, "token-mean", denominator)
        collected.add_loss(loss)
        return loss
