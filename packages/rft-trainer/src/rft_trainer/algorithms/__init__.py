"""Advantages, policy losses and their parts: pure functions on tensors and masks, without ranks or configuration."""

from rft_trainer.algorithms.advantages import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from rft_trainer.algorithms.aggregation import AGGREGATION_MODES, aggregate, check_aggregation_mode, loss_denominator
from rft_trainer.algorithms.groups import (
    group_mean,
    group_norm,
    has_spread,
    informative_groups,
    reinforce_baseline,
    rloo,
)
from rft_trainer.algorithms.kl import (
    KL_KINDS,
    AdaptiveKL,
    FixedKL,
    KLController,
    check_kl_kind,
    kl_estimate,
    kl_loss,
)
from rft_trainer.algorithms.mismatch import (
    MismatchLimit,
    effective_sample_size,
    importance_weights,
    mismatch_metrics,
)
from rft_trainer.algorithms.policy_losses import LossInputs, LossOptions, LossOutputs, PolicyLoss, policy_loss
from rft_trainer.algorithms.returns import discounted_returns, gae, place_on_last_token, token_rewards
from rft_trainer.algorithms.statistics import (
    MetricMax,
    MetricSum,
    Moments,
    RunningMoments,
    masked_mean,
    metric_max,
    metric_mean,
    whiten,
)
from rft_trainer.algorithms.token_terms import (
    entropy_bonus,
    expert_balance_loss,
    expert_counts,
    high_entropy_mask,
    value_loss,
)

__all__ = [
    "AGGREGATION_MODES",
    "KL_KINDS",
    "AdaptiveKL",
    "AdvantageEstimator",
    "AdvantageInputs",
    "AdvantageOutputs",
    "FixedKL",
    "KLController",
    "LossInputs",
    "LossOptions",
    "LossOutputs",
    "MetricMax",
    "MetricSum",
    "MismatchLimit",
    "Moments",
    "PolicyLoss",
    "RunningMoments",
    "aggregate",
    "check_aggregation_mode",
    "check_kl_kind",
    "discounted_returns",
    "effective_sample_size",
    "entropy_bonus",
    "expert_balance_loss",
    "expert_counts",
    "gae",
    "group_mean",
    "group_norm",
    "has_spread",
    "high_entropy_mask",
    "importance_weights",
    "informative_groups",
    "kl_estimate",
    "kl_loss",
    "loss_denominator",
    "masked_mean",
    "metric_max",
    "metric_mean",
    "mismatch_metrics",
    "place_on_last_token",
    "policy_loss",
    "reinforce_baseline",
    "rloo",
    "token_rewards",
    "value_loss",
    "whiten",
]
