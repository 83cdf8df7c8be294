"""The gap between the engine that sampled and the trainer that learns, and weights that correct for it.

Both see the same tokens with the same weights version; kernels, precision or a faulty sync make their log-probs differ.
All tensors are [B, T]; `train_log_probs` are the trainer's at the weights that sampled (the old log-probs), not those
being updated, so the ratio of the policy loss is not counted twice.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_trainer.algorithms.statistics import (
    MetricMax,
    MetricSum,
    keep_masked,
    metric_max,
    metric_mean,
    require_same_shape,
)
from rft_trainer.errors import ConfigurationError, NumericalError

IMPORTANCE_LEVELS = ("token", "sequence")
IMPORTANCE_MODES = ("truncate", "mask", "off")


def importance_weights(
    train_log_probs: Tensor,
    engine_log_probs: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    cap: float = 2.0,
    floor: float = 0.0,
    mode: str = "truncate",
) -> Tensor:
    """Weights p_train / p_engine for the per-token loss, bounded, without gradient.

    Args:
        train_log_probs: [B, T] of the trainer.
        engine_log_probs: [B, T] of the distribution the engine sampled from.
        mask: [B, T].
        level: "token", or "sequence": the product of a row's ratios on each of its tokens.
        cap: largest weight C.
        floor: smallest weight that "mask" keeps; "truncate" does not read it.
        mode: "truncate": min(w, C) (truncated importance sampling, Espeholt et al., arXiv 1802.01561, section 4.1).
            "mask": w where floor <= w <= C, else 0 (IcePop, Ling team, arXiv 2510.18855). "off": ones.

    Returns:
        [B, T] fp32, 0 where masked. Truncation biases towards the engine's policy; a masked token loses its gradient
        and stays in the denominator.

    Raises:
        ConfigurationError: unknown level or mode, or not 0 <= floor < cap.
        ValueError: shapes differ.
    """
    if level not in IMPORTANCE_LEVELS:
        raise ConfigurationError(
            f"importance level {level!r} is not known; choose one of {', '.join(IMPORTANCE_LEVELS)}"
        )
    if mode not in IMPORTANCE_MODES:
        raise ConfigurationError(f"importance mode {mode!r} is not known; choose one of {', '.join(IMPORTANCE_MODES)}")
    if not 0 <= floor < cap:
        raise ConfigurationError(f"importance weights need 0 <= floor < cap, got floor {floor}, cap {cap}")
    require_same_shape(train_log_probs=train_log_probs, engine_log_probs=engine_log_probs, mask=mask)
    if mode == "off":
        return mask.bool().float()
    log_weight = keep_masked(train_log_probs.detach().float() - engine_log_probs.detach().float(), mask)
    if level == "sequence":
        log_weight = log_weight.sum(dim=1, keepdim=True).expand_as(log_weight)
    weight = log_weight.exp()
    if mode == "truncate":
        return keep_masked(weight.clamp(max=cap), mask)
    return keep_masked(weight, mask.bool() & (weight >= floor) & (weight <= cap))


def mismatch_metrics(
    train_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor
) -> dict[str, MetricSum | MetricMax]:
    """Metrics of the gap that add up over ranks and micro-batches.

    Returns:
        gap: mean |log p_train - log p_engine|, nats. gap_max: its maximum. engine_kl: k3 estimate of KL(engine ||
            train).
        outside: share of ratios outside [0.9, 1.1]. weight, weight_square: means of w and w^2, for
        `effective_sample_size`.
    """
    require_same_shape(train_log_probs=train_log_probs, engine_log_probs=engine_log_probs, mask=mask)
    log_ratio = keep_masked(train_log_probs.detach().float() - engine_log_probs.detach().float(), mask)
    # beyond e^20 a ratio says nothing more, and its square would overflow
    bounded = log_ratio.clamp(-20, 20)
    ratio = bounded.exp()
    return {
        "gap": metric_mean(log_ratio.abs(), mask),
        "gap_max": metric_max(log_ratio.abs(), mask),
        "engine_kl": metric_mean(torch.expm1(bounded) - bounded, mask),
        "outside": metric_mean(((ratio < 0.9) | (ratio > 1.1)).float(), mask),
        "weight": metric_mean(ratio, mask),
        "weight_square": metric_mean(ratio.square(), mask),
    }


def effective_sample_size(weight: float, weight_square: float) -> float:
    """Share of the tokens that the weighted sample is worth, (mean w)^2 / mean w^2 (Kish); 1 when all weights are
    equal.

    Take both means over all ranks first. 0.0 without tokens.
    """
    return weight**2 / weight_square if weight_square else 0.0


@dataclass(frozen=True, kw_only=True)
class MismatchLimit:
    """Bounds on the mean gap over all ranks, in nats; None is no bound. Healthy bf16 runs show about 0.01 to 0.02."""

    warn: float | None = 0.05
    stop: float | None = None

    def __post_init__(self) -> None:
        if self.warn is not None and self.stop is not None and not 0 <= self.warn <= self.stop:
            raise ConfigurationError(f"mismatch limits need 0 <= warn <= stop, got warn {self.warn}, stop {self.stop}")

    def check(self, gap: float) -> None:
        """Warn or raise NumericalError; every rank must pass the same reduced number, so that all stop together."""
        if self.stop is not None and not gap <= self.stop:
            raise NumericalError(
                f"mean |log p_train - log p_engine| is {gap:.4g}, over the stop limit {self.stop}; check weight sync, "
                "temperature and truncation of sampling, or raise the limit"
            )
        if self.warn is not None and not gap <= self.warn:
            warnings.warn(
                f"mean |log p_train - log p_engine| is {gap:.4g}, over the warning limit {self.warn}", stacklevel=2
            )
