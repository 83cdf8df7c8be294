"""Advantage estimators under one call: `AdvantageEstimator.get(name)(AdvantageInputs(...)) -> AdvantageOutputs`.

One rule serves all estimators without a critic: subtract the estimator's baseline from the rewards, subtract the KL
penalty per token, and sum to the end of the response (`discounted_returns`). With gamma 1, a score per response and no
KL penalty this puts the baselined score on every token, as the papers write it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rft_trainer.algorithms.groups import (
    GroupBaseline,
    apply_baseline,
    leave_one_out_baseline,
    mean_baseline,
    norm_baseline,
)
from rft_trainer.algorithms.registry import Registered
from rft_trainer.algorithms.returns import discounted_returns, gae, place_on_last_token
from rft_trainer.algorithms.statistics import Moments, keep_masked, require_same_shape
from rft_trainer.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """What an estimator may read.

    Attributes:
        rewards: [N] one score per response, or [N, T] rewards per token (step rewards).
        outcome_rewards: [N] one score per response beside rewards per token; None: their sums. A response without an
            unmasked token has no sum, and its score still counts in the baseline of the others.
        mask: [N, T] response tokens to train on; holes allowed.
        group_size: responses per prompt, side by side (A0 A1 B0 B1).
        kl_penalty: [N, T] divergence times its coefficient, subtracted from the token rewards; None for none.
        values: [N, T] of the critic, for estimators that need one.
        gamma: discount per unmasked token.
        lam: lambda of GAE.
        log_probs: [N, T] of the policy that sampled, for distillation.
        teacher_log_probs: [N, T] of the teacher at the same tokens, for distillation.
        distillation_coef: weight of the teacher's term.
        std: deviation of group_norm, "sample" or "population".
        eps: added to that deviation.
        scale: whose deviation, "group", "batch" or "none".
        moments: of all outcome rewards over all ranks, for scale "batch"; None takes these rewards alone.
    """

    rewards: Tensor
    mask: Tensor
    outcome_rewards: Tensor | None = None
    group_size: int = 1
    kl_penalty: Tensor | None = None
    values: Tensor | None = None
    gamma: float = 1.0
    lam: float = 0.95
    log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    distillation_coef: float = 1.0
    std: str = "sample"
    eps: float = 1e-6
    scale: str = "group"
    moments: Moments | None = None

    def __post_init__(self) -> None:
        if self.rewards.dim() == 2:
            require_same_shape(rewards=self.rewards, mask=self.mask)
        elif self.rewards.shape != self.mask.shape[:1]:
            raise ValueError(
                f"rewards {tuple(self.rewards.shape)} must be [N] or [N, T] for mask {tuple(self.mask.shape)}; "
                "give one score per response or one reward per token"
            )
        if self.outcome_rewards is not None and self.outcome_rewards.shape != self.mask.shape[:1]:
            raise ValueError(
                f"outcome_rewards {tuple(self.outcome_rewards.shape)} must be [N] for mask {tuple(self.mask.shape)}"
            )
        require_same_shape(
            mask=self.mask,
            kl_penalty=self.kl_penalty,
            values=self.values,
            log_probs=self.log_probs,
            teacher_log_probs=self.teacher_log_probs,
        )

    @property
    def outcomes(self) -> Tensor:
        """[N] reward of each whole response."""
        if self.outcome_rewards is not None:
            return self.outcome_rewards
        if self.rewards.dim() == 1:
            return self.rewards
        # In float64 the order of the steps does not show: rounding would be a spread, and dividing by it an explosion.
        return keep_masked(self.rewards.double(), self.mask).sum(dim=1).float()


@dataclass(frozen=True, kw_only=True)
class AdvantageOutputs:
    """`advantages` [N, T] fp32, 0 where masked; `returns` [N, T], the critic's target, or None without a critic."""

    advantages: Tensor
    returns: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator(Registered):
    """One estimator with its facts, and the registry of all of them.

    Attributes:
        name: what `get` takes.
        needs_group: refuses a single response per prompt.
        needs_critic: reads `values`.
        needs_teacher: reads `log_probs` and `teacher_log_probs`.
        whitens: the published form whitens the advantages once over the batch; do it with `whiten` and moments over all
            ranks. The estimator itself never does.
        aggregation: the aggregation mode of the published form.
        paper: source.
        compute: the pure function.
    """

    name: str
    needs_group: bool = False
    needs_critic: bool = False
    needs_teacher: bool = False
    whitens: bool = False
    aggregation: str = "token-mean"
    paper: str
    compute: Callable[[AdvantageInputs], AdvantageOutputs]

    kind: ClassVar[str] = "advantage estimator"
    _registry: ClassVar[dict[str, Registered]] = {}

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """Advantages [N, T] for `inputs`.

        Raises:
            ConfigurationError: the critic's values or the teacher's log-probs are missing.
        """
        self.check(has_critic=inputs.values is not None, has_teacher=inputs.teacher_log_probs is not None)
        with torch.no_grad():
            return self.compute(inputs)

    def check(self, *, group_size: int | None = None, has_critic: bool = True, has_teacher: bool = True) -> None:
        """Raise ConfigurationError naming both settings when the run lacks what this estimator needs.

        Call it at start-up with the number of samples per prompt. The call itself does not refuse a group of one: its
        advantages are 0 there.
        """
        if self.needs_group and group_size is not None and group_size < 2:
            raise ConfigurationError(
                f"advantage_estimator {self.name!r} compares responses to a prompt, n_samples_per_prompt must be >= 2, "
                f"got {group_size}; raise n_samples_per_prompt or choose 'reinforce', 'reinforce++' or 'gae'"
            )
        if self.needs_critic and not has_critic:
            raise ConfigurationError(f"advantage_estimator {self.name!r} needs a critic's values; none were given")
        if self.needs_teacher and not has_teacher:
            raise ConfigurationError(f"advantage_estimator {self.name!r} needs teacher_log_probs; none were given")


def _to_go(inputs: AdvantageInputs, rewards: Tensor) -> Tensor:
    if inputs.kl_penalty is not None:
        rewards = rewards - keep_masked(inputs.kl_penalty.float(), inputs.mask)
    return discounted_returns(rewards, inputs.mask, inputs.gamma)


def _raw_token_rewards(inputs: AdvantageInputs) -> Tensor:
    if inputs.rewards.dim() == 1:
        return place_on_last_token(inputs.rewards.float(), inputs.mask)
    return keep_masked(inputs.rewards.float(), inputs.mask)


def _baselined(inputs: AdvantageInputs, baseline: GroupBaseline) -> Tensor:
    """Token rewards [N, T] whose sum per row is (outcome - shift) * scale; the shift sits on the last token."""
    if inputs.rewards.dim() == 1:
        return place_on_last_token(apply_baseline(inputs.outcomes.float(), baseline), inputs.mask)
    scaled = _raw_token_rewards(inputs) * baseline.scale[:, None]
    return scaled - place_on_last_token(baseline.shift * baseline.scale, inputs.mask)


def _norm(inputs: AdvantageInputs) -> GroupBaseline:
    return norm_baseline(
        inputs.outcomes,
        inputs.group_size,
        std=inputs.std,
        eps=inputs.eps,
        scale=inputs.scale,
        moments=inputs.moments,
    )


def _compute_gae(inputs: AdvantageInputs) -> AdvantageOutputs:
    if inputs.values is None:
        raise ConfigurationError("advantage_estimator 'gae' needs a critic's values; none were given")
    rewards = _raw_token_rewards(inputs)
    if inputs.kl_penalty is not None:
        rewards = rewards - keep_masked(inputs.kl_penalty.float(), inputs.mask)
    advantages, returns = gae(rewards, inputs.values, inputs.mask, inputs.gamma, inputs.lam)
    return AdvantageOutputs(advantages=advantages, returns=returns)


def _compute_reinforce(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs(advantages=_to_go(inputs, _raw_token_rewards(inputs)))


def _compute_mean(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs(
        advantages=_to_go(inputs, _baselined(inputs, mean_baseline(inputs.outcomes, inputs.group_size)))
    )


def _compute_rloo(inputs: AdvantageInputs) -> AdvantageOutputs:
    baseline = leave_one_out_baseline(inputs.outcomes, inputs.group_size)
    return AdvantageOutputs(advantages=_to_go(inputs, _baselined(inputs, baseline)))


def _compute_norm(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs(advantages=_to_go(inputs, _baselined(inputs, _norm(inputs))))


def _compute_distillation(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Group norm of the rewards (0 in groups without spread) plus coef * (log teacher - log policy) at each token."""
    if inputs.log_probs is None or inputs.teacher_log_probs is None:
        raise ConfigurationError(
            "advantage_estimator 'on_policy_distillation' needs log_probs and teacher_log_probs, [N, T] each"
        )
    outcome = _to_go(inputs, _baselined(inputs, _norm(inputs)))
    gap = inputs.teacher_log_probs.float() - inputs.log_probs.float()
    return AdvantageOutputs(advantages=outcome + inputs.distillation_coef * keep_masked(gap, inputs.mask))


for _entry in (
    AdvantageEstimator(
        name="gae",
        needs_critic=True,
        whitens=True,
        paper="Schulman et al., arXiv 1506.02438, section 3; PPO, arXiv 1707.06347, section 5",
        compute=_compute_gae,
    ),
    AdvantageEstimator(
        name="reinforce",
        paper="Williams 1992; return to go, discounted",
        compute=_compute_reinforce,
    ),
    AdvantageEstimator(
        name="reinforce++",
        whitens=True,
        paper="Hu et al., arXiv 2501.03262",
        compute=_compute_reinforce,
    ),
    AdvantageEstimator(
        name="reinforce++_baseline",
        needs_group=True,
        whitens=True,
        paper="Hu et al., arXiv 2501.03262",
        compute=_compute_mean,
    ),
    AdvantageEstimator(
        name="reinforce_baseline",
        needs_group=True,
        paper="Hu et al., arXiv 2501.03262, without its whitening",
        compute=_compute_mean,
    ),
    AdvantageEstimator(
        name="rloo",
        needs_group=True,
        paper="Ahmadian et al., arXiv 2402.14740",
        compute=_compute_rloo,
    ),
    AdvantageEstimator(
        name="group_mean",
        needs_group=True,
        paper="group mean as baseline, no deviation; Liu et al., arXiv 2503.20783",
        compute=_compute_mean,
    ),
    AdvantageEstimator(
        name="group_norm",
        needs_group=True,
        aggregation="seq-mean-token-mean",
        paper="GRPO, Shao et al., arXiv 2402.03300, section 4.1.2",
        compute=_compute_norm,
    ),
    AdvantageEstimator(
        name="grpo",
        needs_group=True,
        aggregation="seq-mean-token-mean",
        paper="GRPO, Shao et al., arXiv 2402.03300, section 4.1.2 (a second name of group_norm)",
        compute=_compute_norm,
    ),
    AdvantageEstimator(
        name="dr_grpo",
        needs_group=True,
        aggregation="seq-mean-token-sum-norm",
        paper="Dr.GRPO, Liu et al., arXiv 2503.20783",
        compute=_compute_mean,
    ),
    AdvantageEstimator(
        name="cpgd",
        needs_group=True,
        paper="CPGD, Liu et al., arXiv 2505.12504, equal weights",
        compute=_compute_mean,
    ),
    AdvantageEstimator(
        name="on_policy_distillation",
        needs_teacher=True,
        paper="reverse KL to a teacher at the student's own tokens; Agarwal et al., arXiv 2306.13649; Gu et al., "
        "arXiv 2306.08543",
        compute=_compute_distillation,
    ),
):
    AdvantageEstimator.register(_entry)
