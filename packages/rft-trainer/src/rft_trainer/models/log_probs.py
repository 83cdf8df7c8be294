"""Log-probs of given tokens in fp32, without a [tokens, vocabulary] tensor.

The distribution is softmax(logits / temperature), cut to its top k and top p tokens when asked, in this order (the
order of vLLM and SGLang), so that an on-policy ratio is 1 when the engine sampled with the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor

from rft_trainer.errors import ConfigurationError, UnsupportedCombination

DEFAULT_CHUNK_TOKENS = 1024
_TILE_ELEMENTS = 1 << 24
"""Elements of one temporary (64 MiB in fp32): of a low-precision head read in fp32, and of sorted logits."""


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """What of the distribution was sampled from.

    Attributes:
        temperature: logits are divided by it.
        top_k: tokens kept; None keeps all.
        top_p: smallest set of tokens whose probability reaches it; None or 1.0 keeps all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ConfigurationError(
                f"temperature must be positive and finite, got {self.temperature}; "
                "log-probs of greedy sampling are not defined, use 1.0"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigurationError(f"top_k must be at least 1, got {self.top_k}; None keeps all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p must lie in (0, 1], got {self.top_p}; None keeps all tokens")

    @property
    def cuts(self) -> bool:
        """True when some tokens are left out."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)

    def threshold(self, scaled: Tensor) -> Tensor:
        """[n, 1] smallest scaled logit that is kept, from [n, V] logits already divided by the temperature."""
        # sorted in blocks of rows: values, indices and probabilities of a whole chunk would take six times its memory
        blocks = scaled.split(max(1, _TILE_ELEMENTS // scaled.shape[-1]))  # type: ignore[no-untyped-call]
        return torch.cat([self._block_threshold(block) for block in blocks])

    def _block_threshold(self, scaled: Tensor) -> Tensor:
        count = min(self.top_k or scaled.shape[-1], scaled.shape[-1])
        ordered = scaled.topk(count, dim=-1).values
        if self.top_p is None or self.top_p >= 1:
            return ordered[:, -1:]
        probabilities = ordered.softmax(dim=-1)
        # a token is kept while the probability before it has not reached top_p, so the first always is
        kept = (probabilities.cumsum(dim=-1) - probabilities) < self.top_p
        return ordered.gather(1, kept.sum(dim=-1, keepdim=True) - 1)


def gather_log_probs(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Log-prob of each label from full logits, in fp32.

    Args:
        logits: [..., V], any float dtype; position t holds the distribution of `labels[..., t]` (already shifted).
        labels: [...] token ids.
        temperature, top_k, top_p: of the sampling; a label outside the cut is kept in it.

    Returns:
        [...] fp32.

    Raises:
        ValueError: shapes disagree or labels are no integers, in every dtype.
    """
    _check_labels(logits, labels, "logits")
    truncation = Truncation(temperature=temperature, top_k=top_k, top_p=top_p)
    flat = logits.reshape(-1, logits.shape[-1]).float() / temperature
    index = labels.reshape(-1, 1).long()
    if truncation.cuts:
        flat = flat.masked_fill(_dropped(flat, index, truncation.threshold(flat.detach())), -torch.inf)
    return flat.log_softmax(dim=-1).gather(1, index).reshape(labels.shape)


@overload
def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    with_entropy: Literal[False] = False,
) -> Tensor: ...


@overload
def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    with_entropy: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-prob of each label straight from the last hidden states, chunk by chunk, with recompute in backward.

    Args:
        hidden: [..., H] input of the head; position t predicts `labels[..., t]` (already shifted and cut to the
            response).
        weight: [V, H] of the head, a whole plain tensor (unshard it once around the pass).
        labels: [...] token ids.
        bias: [V] or None.
        temperature, top_k, top_p: of the sampling; a label outside the cut is kept in it.
        chunk_tokens: tokens whose logits exist at one time; about 12 bytes x V of working memory each in backward.
        with_entropy: also return the entropy of the (cut) distribution.

    Returns:
        log-probs [...] fp32, or (log-probs, entropy in nats). Both carry gradients to hidden, weight and bias; sums are
        made in fp32 whatever the dtype of the inputs, gradients come back in the dtype of each input.

    Raises:
        ValueError: shapes disagree or labels are no integers.
        ConfigurationError: temperature, top_k, top_p or chunk_tokens out of range.
    """
    _check_labels(hidden, labels, "hidden")
    _check_head(hidden, weight, bias)
    if chunk_tokens < 1:
        raise ConfigurationError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    truncation = Truncation(temperature=temperature, top_k=top_k, top_p=top_p)
    flat = hidden.reshape(-1, hidden.shape[-1])
    log_probs, entropy = _HeadLogProbs.apply(  # type: ignore[no-untyped-call]
        flat, weight, bias, labels.long(), truncation, chunk_tokens, with_entropy
    )
    return (log_probs, entropy) if with_entropy else log_probs


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if hasattr(weight, "full_tensor"):
        raise UnsupportedCombination(
            f"chunked_log_probs with a DTensor head {tuple(weight.shape)}: pass weight.full_tensor(), gathered once"
        )
    width, given = hidden.shape[-1], None if bias is None else tuple(bias.shape)
    if weight.dim() != 2 or weight.shape[1] != width or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"weight {tuple(weight.shape)} must be [V, {width}] for hidden {tuple(hidden.shape)} and bias [V], "
            f"got {given}; a sharded head must be gathered first"
        )


def _check_labels(source: Tensor, labels: Tensor, name: str) -> None:
    if source.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must match {name} {tuple(source.shape)} without its last dimension; "
            "shift and cut both to the same response tokens"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, got {labels.dtype}; pass token ids")


def _dropped(scaled: Tensor, labels: Tensor, threshold: Tensor) -> Tensor:
    """[n, V] bool: below the threshold and not the label, so that a label the engine's rounding let in stays finite."""
    return (scaled < threshold).scatter_(1, labels, False)


def _product_fp32(left: Tensor, right: Tensor) -> Tensor:
    """left @ right with fp32 sums and an fp32 result; the factors keep their own precision."""
    if left.is_cuda and left.dtype == right.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[n, V] fp32 logits over the temperature; a low-precision head is read in tiles, never copied whole to fp32."""
    if weight.dtype == hidden.dtype and (weight.dtype == torch.float32 or weight.is_cuda):
        logits = _product_fp32(hidden, weight.t())
    else:
        rows, tile = weight.shape[0], _tile_rows(weight)
        logits = torch.empty(hidden.shape[0], rows, dtype=torch.float32, device=hidden.device)
        for start in range(0, rows, tile):
            logits[:, start : start + tile] = _product_fp32(hidden, weight[start : start + tile].t())
    if bias is not None:
        logits += bias.float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _tile_rows(weight: Tensor) -> int:
    return max(1, _TILE_ELEMENTS // weight.shape[1])


def _log_distribution(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, cut: Truncation, threshold: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """([n, V] log-probs of a chunk, -inf where cut, and the threshold [n, 1] of the cut); a given one is reused."""
    scaled = _scaled_logits(hidden, weight, bias, cut.temperature)
    if cut.cuts:
        threshold = cut.threshold(scaled) if threshold is None else threshold
        scaled.masked_fill_(_dropped(scaled, labels, threshold), -torch.inf)
    return scaled.log_softmax(dim=-1), threshold


class _HeadLogProbs(torch.autograd.Function):
    """(log-prob, entropy) of each token; saves per token only the entropy and the threshold of the cut.

    When the head is frozen and no entropy is asked for, the gradient of each token's log-prob at its hidden state
    [tokens, H]
    is made in the forward pass and kept instead: it saves the recompute, a third of the work.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        truncation: Truncation,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        tokens, flat_labels = hidden.shape[0], labels.reshape(-1)
        # hazard: outputs in the shape of the labels, not reshaped behind: FSDP2 loses its backward hook on a view
        log_probs = torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros_like(log_probs)
        flat_log_probs, flat_entropy = log_probs.view(-1), entropy.view(-1)
        thresholds = torch.zeros(tokens if truncation.cuts else 0, 1, device=hidden.device)
        keeps_slope = ctx.needs_input_grad[:3] == (True, False, False) and not with_entropy
        slopes = torch.empty(hidden.shape, device=hidden.device) if keeps_slope else None
        for start in range(0, tokens, chunk_tokens):
            part = slice(start, start + chunk_tokens)
            index = flat_labels[part, None]
            log_p, threshold = _log_distribution(hidden[part], weight, bias, index, truncation, None)
            flat_log_probs[part] = log_p.gather(1, index).squeeze(1)
            if threshold is not None:
                thresholds[part] = threshold
            if with_entropy:
                flat_entropy[part] = _entropy(log_p)
            if slopes is not None:
                ones = torch.ones(len(index), 1, device=hidden.device)
                slope = _product_tiled(_logits_gradient(log_p, index, ones, None, ones), weight)
                slopes[part] = slope.div_(truncation.temperature)
        ctx.save_for_backward(hidden, weight, bias, flat_labels, thresholds, entropy, slopes)
        ctx.truncation, ctx.chunk_tokens, ctx.with_entropy = truncation, chunk_tokens, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = (grad.reshape(-1, 1) for grad in grad_outputs)
        hidden, weight, bias, labels, thresholds, entropy, slopes = ctx.saved_tensors
        if slopes is not None:
            return ((slopes * grad_log_probs).to(hidden.dtype), *(None,) * 6)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        grad_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if needs_bias else None
        flat_entropy = entropy.view(-1, 1)
        for start in range(0, hidden.shape[0], ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            index = labels[part, None]
            log_p, _ = _log_distribution(hidden[part], weight, bias, index, ctx.truncation, thresholds[part])
            grad = _logits_gradient(
                log_p,
                index,
                grad_log_probs[part],
                flat_entropy[part] if ctx.with_entropy else None,
                grad_entropy[part],
            )
            grad.div_(ctx.truncation.temperature)
            if grad_hidden is not None:
                grad_hidden[part] = _product_tiled(grad, weight)
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[part].float())
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _entropy(log_p: Tensor) -> Tensor:
    """-sum p log p; overwrites `log_p`."""
    p = log_p.exp()
    # a cut token has probability 0 and log-prob -inf: its term is 0
    return -p.mul_(log_p.masked_fill_(log_p == -torch.inf, 0.0)).sum(dim=-1)


def _logits_gradient(
    log_p: Tensor, labels: Tensor, grad_log_probs: Tensor, entropy: Tensor | None, grad_entropy: Tensor
) -> Tensor:
    """[n, V] gradient at the scaled logits: g (1_label - p) - g_H p (log p + H); overwrites `log_p`."""
    if entropy is None:
        grad = log_p.exp_().mul_(-grad_log_probs)
    else:
        p = log_p.exp()
        slope = log_p.masked_fill_(log_p == -torch.inf, 0.0).add_(entropy).mul_(grad_entropy)
        grad = slope.add_(grad_log_probs).mul_(p).neg_()
    return grad.scatter_add_(1, labels, grad_log_probs)


def _product_tiled(grad: Tensor, weight: Tensor) -> Tensor:
    """[n, H] = grad [n, V] @ weight, fp32 sums; a low-precision head is read in tiles."""
    if weight.dtype == torch.float32:
        return grad @ weight
    total = torch.zeros(grad.shape[0], weight.shape[1], dtype=torch.float32, device=grad.device)
    tile = _tile_rows(weight)
    for start in range(0, weight.shape[0], tile):
        total.addmm_(grad[:, start : start + tile], weight[start : start + tile].float())
    return total
