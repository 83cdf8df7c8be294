"""The formulas of the policy losses, to be minimised; r = exp(log_ratio), A the advantage, all [B, T].

Inputs arrive with masked cells set to 0, so no cell behind the end reaches a sequence mean. Each formula is registered
in `policy_losses` with its paper, its defaults and the options it reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Options = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class SurrogateInputs:
    """[B, T] each: log_ratio and log_probs with gradient, advantages without; all 0 where the bool mask is not set."""

    log_ratio: Tensor
    log_probs: Tensor
    advantages: Tensor
    mask: Tensor

    def row_mean(self, values: Tensor) -> Tensor:
        """[B, 1] mean over the unmasked tokens of each row; 0 for a row without any."""
        return values.sum(dim=1, keepdim=True) / self.mask.sum(dim=1, keepdim=True).clamp(min=1)


class Surrogate(NamedTuple):
    """`loss` [B, T] and `clipped` [B, T] bool: tokens whose gradient the clip has removed or capped."""

    loss: Tensor
    clipped: Tensor


def _number(options: Options, name: str) -> float:
    value = options[name]
    assert value is not None, f"option {name} has no default"
    return value


def _pessimistic(ratio: Tensor, advantages: Tensor, options: Options) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A)."""
    clipped_ratio = ratio.clamp(1 - _number(options, "clip_low"), 1 + _number(options, "clip_high"))
    free, bound = -ratio * advantages, -clipped_ratio * advantages
    return Surrogate(torch.maximum(free, bound), bound > free)


def ppo(inputs: SurrogateInputs, options: Options) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A), with dual_clip c at most -c A where A < 0.

    The dual clip caps the loss of a negative advantage whose ratio exploded; the published objective is
    max(min(r A, clip(r) A), c A) for A < 0.
    """
    loss, clipped = _pessimistic(inputs.log_ratio.exp(), inputs.advantages, options)
    dual_clip = options["dual_clip"]
    if dual_clip is None:
        return Surrogate(loss, clipped)
    ceiling = -dual_clip * inputs.advantages
    is_capped = (inputs.advantages < 0) & (ceiling < loss)
    return Surrogate(torch.where(is_capped, ceiling, loss), clipped | is_capped)


def cpgd(inputs: SurrogateInputs, options: Options) -> Surrogate:
    """-min(log r A, clip(log r, log(1 - low), log(1 + high)) A) + drift_coef * drift.

    The drift is the k3 estimate of KL(old || new) at the old policy's tokens, r - 1 - log r. Its gradient (r - 1) is
    capped at drift_cap, as the paper does to keep a large ratio from exploding. We differ in the default: drift_coef 0,
    the drift is added when asked for; and the advantage is the plain difference to the group mean (equal weights).
    """
    clip_low = _number(options, "clip_low")
    low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    high = math.log1p(_number(options, "clip_high"))
    free = -inputs.log_ratio * inputs.advantages
    bound = -inputs.log_ratio.clamp(low, high) * inputs.advantages
    loss = torch.maximum(free, bound)
    drift_coef = _number(options, "drift_coef")
    if drift_coef:
        excess = inputs.log_ratio.detach().expm1()
        slope = excess.clamp(max=_number(options, "drift_cap"))
        value = excess - inputs.log_ratio.detach()
        # value of k3, gradient of the capped slope
        loss = loss + drift_coef * (value + slope * (inputs.log_ratio - inputs.log_ratio.detach()))
    return Surrogate(loss, bound > free)


def gspo(inputs: SurrogateInputs, options: Options) -> Surrogate:
    """-min(s A, clip(s) A) with s = exp(mean of log r over the row) and A the row's mean advantage, on every token.

    The paper has one advantage per response; where tokens differ (KL in the reward, a critic) we take their mean.
    """
    ratio = inputs.row_mean(inputs.log_ratio).exp()
    loss, clipped = _pessimistic(ratio, inputs.row_mean(inputs.advantages), options)
    return Surrogate(loss.expand_as(inputs.log_ratio), clipped.expand_as(inputs.log_ratio))


def gspo_token(inputs: SurrogateInputs, options: Options) -> Surrogate:
    """As gspo in value, with each token's own advantage and the gradient through that token's log-prob alone."""
    carrier = (inputs.log_probs - inputs.log_probs.detach()).exp()
    ratio = inputs.row_mean(inputs.log_ratio).exp().detach() * carrier
    return _pessimistic(ratio, inputs.advantages, options)


def gmpo(inputs: SurrogateInputs, options: Options) -> Surrogate:
    """-A exp(mean of clipped log r over the row): the geometric mean of the ratios, clipped per token in log space.

    For A > 0 a log-ratio counts at most clip_high, for A < 0 at least -clip_low; the paper's range (e^-0.4, e^0.4) is
    the default. A is the row's mean advantage.
    """
    advantage = inputs.row_mean(inputs.advantages)
    high, low = _number(options, "clip_high"), -_number(options, "clip_low")
    bound = torch.where(advantage > 0, inputs.log_ratio.clamp(max=high), inputs.log_ratio.clamp(min=low))
    loss = -advantage * inputs.row_mean(bound).exp()
    return Surrogate(loss.expand_as(inputs.log_ratio), bound != inputs.log_ratio)


def cispo(inputs: SurrogateInputs, options: Options) -> Surrogate:
    """-stop_gradient(clip(r, 1 - low, 1 + high)) A log p: the clip bounds a weight, no token loses its gradient.

    The paper tunes the upper bound alone and gives no number: our default is no lower bound and a weight of at most 5,
    one of the values swept in ScaleRL (arXiv 2510.13786).
    """
    ratio = inputs.log_ratio.detach().exp()
    weight = ratio.clamp(1 - _number(options, "clip_low"), 1 + _number(options, "clip_high"))
    return Surrogate(-weight * inputs.advantages * inputs.log_probs, weight != ratio)


def sapo(inputs: SurrogateInputs, options: Options) -> Surrogate:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a soft gate whose slope at r = 1 is 1.

    No token is clipped; the value at r = 1 is 2 A / tau, a constant that has no gradient.
    """
    positive, negative = _number(options, "tau_positive"), _number(options, "tau_negative")
    tau = torch.where(inputs.advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (inputs.log_ratio.exp() - 1)) * 4 / tau
    return Surrogate(-gate * inputs.advantages, torch.zeros_like(inputs.mask))


def reinforce(inputs: SurrogateInputs, options: Options) -> Surrogate:
    """-A log p, without a ratio: exact for the first update after a rollout, uncorrected for later ones."""
    return Surrogate(-inputs.advantages * inputs.log_probs, torch.zeros_like(inputs.mask))
