"""From scores to advantages: penalties, normalisation, the divergence in the reward, the estimator, whitening."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rft_dist import Mean
from rft_rewards import overlong_penalty
from rft_trainer.algorithms import (
    AdvantageEstimator,
    AdvantageInputs,
    KLController,
    Moments,
    RunningMoments,
    kl_estimate,
    whiten,
)
from rft_trainer.experience.experience import Experience, reward_sample
from rft_trainer.models.padding import right_pad
from rft_trainer.strategy.protocols import DataParallel


@dataclass(frozen=True, kw_only=True)
class CreditConfig:
    """Numbers of the way from scores to advantages.

    estimator: entry of `AdvantageEstimator`; group_size, gamma, lam, std, scale, distillation_coef: its numbers.
    whiten: whiten over all ranks; None does as the estimator's published form.
    normalisation: "none", "scale" or "centre": rewards over the moments of all rewards so far.
    reward_clip, advantage_clip: bounds on the size; None for none.
    max_tokens: longest response; overlong_buffer tokens of it are penalised, up to overlong_factor.
    overlong_filter: responses that were cut by length train nothing.
    kl_estimator: kind of the divergence in the reward; None puts none there.
    """

    estimator: str
    group_size: int
    gamma: float = 1.0
    lam: float = 0.95
    std: str = "sample"
    scale: str = "group"
    distillation_coef: float = 1.0
    whiten: bool | None = None
    normalisation: str = "none"
    reward_clip: float | None = None
    advantage_clip: float | None = None
    max_tokens: int = 1
    overlong_buffer: int = 0
    overlong_factor: float = 1.0
    overlong_filter: bool = False
    kl_estimator: str | None = None


class CreditAssigner:
    """Fills `reward`, `advantages` and `returns` of one step's experiences.

    Each moment (of rewards so far, of this step's rewards, of advantages) is taken once per step over all ranks, so
    the result does not depend on how the experiences are spread.

    kl: the coefficient of the divergence in the reward.
    """

    def __init__(self, config: CreditConfig, data: DataParallel, kl: KLController) -> None:
        self._config = config
        self._estimator = AdvantageEstimator.get(config.estimator)
        self._whitens = self._estimator.whitens if config.whiten is None else config.whiten
        self._data = data
        self._kl = kl
        self._running = RunningMoments()

    def __call__(self, experiences: Sequence[Experience]) -> dict[str, Mean]:
        """Metrics under `rollout/` that still want their reduction. Collective over the world."""
        self._shape_rewards(experiences)
        mask, divergence = self._columns(experiences, "response_mask"), self._divergence(experiences)
        self._advantages(experiences, mask, divergence)
        if self._config.kl_estimator is None:
            return {}
        total = 0.0 if divergence is None else float((divergence * mask).sum())
        return {"rollout/kl": Mean(total, float(mask.sum()))}

    def state_dict(self) -> dict[str, Any]:
        """The moments of all rewards so far."""
        return self._running.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._running.load_state_dict(state)

    def _shape_rewards(self, experiences: Sequence[Experience]) -> None:
        """score -> penalty -> normalisation -> clip."""
        config = self._config
        for experience in experiences:
            experience.reward = experience.score
            if config.overlong_filter and experience.truncated:
                experience.response_mask = torch.zeros_like(experience.response_mask)
        if config.overlong_buffer and experiences:
            penalise = overlong_penalty(config.max_tokens, config.overlong_buffer, config.overlong_factor)
            for experience, penalty in zip(experiences, penalise([reward_sample(e) for e in experiences]), strict=True):
                experience.reward += penalty
                experience.scores = {**experience.scores, "overlong": penalty}
        rewards = torch.tensor([e.reward for e in experiences], dtype=torch.float64)
        if config.normalisation != "none":
            self._running.update(Moments(self._data.sum(Moments.of(rewards).sums)))
            rewards = self._running.normalise(rewards, centred=config.normalisation == "centre")
        if config.reward_clip is not None:
            rewards = rewards.clamp(-config.reward_clip, config.reward_clip)
        for experience, reward in zip(experiences, rewards.tolist(), strict=True):
            experience.reward = reward

    def _divergence(self, experiences: Sequence[Experience]) -> Tensor | None:
        if self._config.kl_estimator is None or not experiences:
            return None
        mask = self._columns(experiences, "response_mask")
        old, reference = (self._columns(experiences, name) for name in ("old_log_probs", "ref_log_probs"))
        return kl_estimate(old, reference, self._config.kl_estimator, mask)

    def _advantages(self, experiences: Sequence[Experience], mask: Tensor, divergence: Tensor | None) -> None:
        config, returns = self._config, None
        moments = None
        if config.scale == "batch":
            rewards = torch.tensor([e.reward for e in experiences])
            moments = Moments(self._data.sum(Moments.of(rewards).sums))
        advantages = torch.zeros(mask.shape)
        if experiences:
            outputs = self._estimator(self._inputs(experiences, mask, divergence, moments))
            advantages, returns = outputs.advantages, outputs.returns
        if self._whitens:
            # A rank without responses joins with zeros.
            over_ranks = Moments(self._data.sum(Moments.of(advantages, mask).sums))
            advantages = whiten(advantages, mask, moments=over_ranks)
        if config.advantage_clip is not None:
            advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
        for row, experience in enumerate(experiences):
            length = len(experience.response_ids)
            experience.advantages = advantages[row, :length]
            experience.returns = None if returns is None else returns[row, :length]

    def _inputs(
        self, experiences: Sequence[Experience], mask: Tensor, divergence: Tensor | None, moments: Moments | None
    ) -> AdvantageInputs:
        config = self._config
        teaches = self._estimator.needs_teacher
        return AdvantageInputs(
            rewards=_rewards(experiences, mask),
            outcome_rewards=torch.tensor([e.reward for e in experiences]),
            mask=mask,
            group_size=config.group_size,
            kl_penalty=None if divergence is None else self._kl.value * divergence,
            values=self._columns(experiences, "values") if self._estimator.needs_critic else None,
            gamma=config.gamma,
            lam=config.lam,
            log_probs=self._columns(experiences, "old_log_probs") if teaches else None,
            teacher_log_probs=self._columns(experiences, "teacher_log_probs") if teaches else None,
            distillation_coef=config.distillation_coef,
            std=config.std,
            scale=config.scale,
            moments=moments,
        )

    @staticmethod
    def _columns(experiences: Sequence[Experience], name: str) -> Tensor:
        if not experiences:
            return torch.zeros(0, 0)
        return right_pad([getattr(e, name) for e in experiences], 0)[0]


def _rewards(experiences: Sequence[Experience], mask: Tensor) -> Tensor:
    """[N] rewards, or [N, T] when any response has rewards at its steps.

    A step's reward lies on its token; what the reward holds beside the steps lies on the last trained token, and all of
    it does where there are no steps or nothing is trained at a step.
    """
    rewards = torch.tensor([e.reward for e in experiences])
    if not any(e.step_rewards for e in experiences):
        return rewards
    tokens = torch.zeros(mask.shape)
    for row, experience in enumerate(experiences):
        trained = mask[row].nonzero().flatten()
        if not len(trained):
            continue
        rest = experience.reward
        for column, reward in experience.step_rewards:
            if mask[row, column]:
                tokens[row, column] += reward
                rest -= reward
        tokens[row, trained[-1]] += rest
    return tokens
