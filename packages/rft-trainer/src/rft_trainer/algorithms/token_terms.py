"""Terms beside the policy loss: the critic's loss, entropy, the choice of tokens by entropy, the balance of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from rft_trainer.algorithms.policy_losses import LossOutputs
from rft_trainer.algorithms.statistics import keep_masked, metric_mean, require_same_shape
from rft_trainer.errors import ConfigurationError


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = None
) -> LossOutputs:
    """Per-token loss of the critic, [B, T]: 0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2).

    Args:
        values: [B, T] of the critic being trained.
        old_values: [B, T] when the advantages were made.
        returns: [B, T] targets.
        mask: [B, T].
        clip: c in units of value; None leaves 0.5 * (V - R)^2 (PPO, arXiv 1707.06347, section 5). The clip is that
            of the authors' code, not of the paper. The factor 0.5 is ours as in that code.

    Returns:
        LossOutputs with the metrics value_clip_fraction, value_error (squared) and value.
    """
    require_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values = keep_masked(values.float(), mask)
    old_values = keep_masked(old_values.detach().float(), mask)
    returns = keep_masked(returns.detach().float(), mask)
    error = (values - returns).square()
    bound = error
    if clip is not None:
        if clip <= 0:
            raise ConfigurationError(f"value clip must be positive, got {clip}; None switches it off")
        bound = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return LossOutputs(
        loss=keep_masked(0.5 * torch.maximum(error, bound), mask),
        metrics={
            "value_clip_fraction": metric_mean((bound > error).float(), mask),
            "value_error": metric_mean(error, mask),
            "value": metric_mean(values, mask),
        },
    )


def entropy_bonus(entropy: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """Per-token term to add to the loss, [B, T]: -coefficient * entropy; 0 where masked (PPO, arXiv 1707.06347,
    section 5).

    `entropy` [B, T] in nats with gradient, as `chunked_log_probs(..., with_entropy=True)` gives it.
    """
    return -coefficient * keep_masked(entropy, mask)


def high_entropy_mask(entropy: Tensor, mask: Tensor, ratio: float) -> Tensor:
    """The tokens of highest entropy in each response (Wang et al., arXiv 2506.01939).

    Args:
        entropy: [B, T].
        mask: [B, T].
        ratio: share of tokens to keep, in (0, 1]; the count per row is rounded up.

    Returns:
        [B, T] bool within the mask. Ties go to the earlier token. The paper takes the quantile over the whole batch; we
        take it per response, so that the choice does not depend on how the batch is split. The paper keeps all tokens
        in the
        denominator: pass this mask as a weight of the loss for that, or as the loss mask to divide by the chosen ones.

    Raises:
        ConfigurationError: ratio outside (0, 1].
    """
    if not 0 < ratio <= 1:
        raise ConfigurationError(f"high-entropy ratio must lie in (0, 1], got {ratio}; 1 keeps every token")
    require_same_shape(entropy=entropy, mask=mask)
    present = mask.bool()
    lowest = torch.full_like(entropy.detach().float(), -torch.inf)
    order = torch.where(present, entropy.detach().float(), lowest).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(mask.shape[1], device=mask.device).expand_as(order))
    # float64 so that 0.2 * 5 does not round up to 2
    keep = torch.ceil(present.sum(dim=1, keepdim=True).double() * ratio - 1e-9)
    return present & (rank < keep)


def expert_counts(router_logits: Tensor, mask: Tensor, top_k: int) -> Tensor:
    """[E] how often each expert is among the top k of an unmasked token; sum it over ranks before
    `expert_balance_loss`.

    `router_logits` [tokens, E], `mask` [tokens].
    """
    chosen = router_logits.topk(top_k, dim=-1).indices
    hits = torch.zeros_like(router_logits, dtype=torch.float32).scatter_(1, chosen, 1.0)
    return (hits * mask.bool()[:, None]).sum(dim=0)


def expert_balance_loss(router_logits: Tensor, mask: Tensor, counts: Tensor, denominator: Tensor | float) -> Tensor:
    """Load balance of a mixture of experts: E * sum_e f_e P_e (Switch Transformer, arXiv 2101.03961, section 2.2).

    Args:
        router_logits: [tokens, E] of one layer, or of several layers stacked along the tokens.
        mask: [tokens].
        counts: [E] `expert_counts` over all micro-batches and ranks; f = counts / denominator carries no gradient.
        denominator: unmasked tokens over all micro-batches and ranks (times layers when stacked).

    Returns:
        This micro-batch's part, a scalar. With f and the denominator global, the parts of all micro-batches and ranks
        add up to the loss of the whole batch; the paper takes both per micro-batch. With top k the sum of f is k.
    """
    divisor = denominator.clamp(min=1) if isinstance(denominator, Tensor) else max(denominator, 1.0)
    probabilities = router_logits.float().softmax(dim=-1)
    local = keep_masked(probabilities, mask[:, None].expand_as(probabilities)).sum(dim=0) / divisor
    return router_logits.shape[-1] * (counts.detach() / divisor * local).sum()
