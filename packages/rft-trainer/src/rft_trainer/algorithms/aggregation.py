"""From losses per token to one scalar, divided by one denominator for all ranks and micro-batches.

Use: `local = loss_denominator(mask, mode)` summed over the micro-batches of one update, all-reduced with SUM before the
first backward; then each micro-batch calls `aggregate(loss, mask, mode, denominator)` and backward. The gradients
summed over ranks and micro-batches are those of one big batch. A backend that averages gradients over its ranks needs
the scalar times the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft_trainer.algorithms.statistics import keep_masked
from rft_trainer.errors import ConfigurationError

AGGREGATION_MODES: tuple[str, ...] = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
"""token-mean: DAPO, arXiv 2503.14476, section 3.3. seq-mean-token-mean: GRPO, arXiv 2402.03300, section 4.1.1.
seq-mean-token-sum: the plain policy gradient of whole responses. seq-mean-token-sum-norm: the latter over a fixed
length, Dr.GRPO, arXiv 2503.20783."""


def check_aggregation_mode(mode: str) -> None:
    """Raise ConfigurationError listing the modes unless `mode` is one of `AGGREGATION_MODES`."""
    if mode not in AGGREGATION_MODES:
        raise ConfigurationError(f"aggregation {mode!r} is not known; choose one of {', '.join(AGGREGATION_MODES)}")


def loss_denominator(mask: Tensor, mode: str, fixed_length: int | None = None) -> Tensor:
    """What one micro-batch adds to the global denominator, an fp32 scalar.

    Args:
        mask: [B, T] tokens that are trained on.
        mode: one of `AGGREGATION_MODES`.
        fixed_length: L of "seq-mean-token-sum-norm", a constant of the run such as the longest response allowed.

    Returns:
        token-mean: unmasked tokens. The other modes: rows with at least one unmasked token (a row that is masked as a
        whole changes nothing for the others), times L for the fixed-length mode.

    Raises:
        ConfigurationError: unknown mode, or L missing, not positive, or given to a mode that has no use for it.
    """
    check_aggregation_mode(mode)
    is_fixed = mode == "seq-mean-token-sum-norm"
    if is_fixed != (fixed_length is not None) or (fixed_length is not None and fixed_length < 1):
        raise ConfigurationError(
            f"fixed_length {fixed_length} with aggregation {mode!r}: 'seq-mean-token-sum-norm' needs 1 or more, "
            "the other modes take none"
        )
    present = mask.bool()
    if mode == "token-mean":
        return present.sum().float()
    rows = present.any(dim=1).sum().float()
    return rows if fixed_length is None else rows * fixed_length


def aggregate(loss: Tensor, mask: Tensor, mode: str, denominator: Tensor | float) -> Tensor:
    """This micro-batch's part of the global loss, a scalar.

    Args:
        loss: [B, T] per token; masked cells are not read.
        mask: [B, T].
        mode: one of `AGGREGATION_MODES`.
        denominator: `loss_denominator` summed over all micro-batches and ranks of the update.

    Returns:
        sum over the micro-batch / denominator; 0.0 still joined to the graph when the denominator is 0, so that a rank
        without tokens runs the same backward as the others.
    """
    check_aggregation_mode(mode)
    kept = keep_masked(loss, mask)
    if mode == "seq-mean-token-mean":
        kept = kept / mask.bool().sum(dim=1, keepdim=True).clamp(min=1)
    if not isinstance(denominator, Tensor):
        # a number stays on the host: as a tensor it would be copied to the GPU and waited for
        return kept.sum() / (denominator or 1.0)
    divisor = denominator.to(loss.device, torch.float32)
    return kept.sum() / torch.where(divisor == 0, torch.ones_like(divisor), divisor)
