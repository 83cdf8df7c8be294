"""Attention of single-token steps without copying keys and values for grouped heads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPED_DECODE = "rft_grouped_decode"


def grouped_decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention where the query heads of a group stand in for query positions.

    With one query position, query [B, heads, 1, D] seen as [B, kv_heads, group, D] attends to key and value
    [B, kv_heads, S, D] as they lie in the cache. transformers' own path repeats both for each query head whenever
    there is a mask: at 64 rows that copy costs as much as the matrix products. Longer queries, and what this form
    does not cover, go to transformers' path.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, positions, head_dim = query.shape
    kv_heads = key.shape[1]
    plain = positions == 1 and (attention_mask is None or attention_mask.shape[1] == 1)
    if not plain or kwargs.get("position_bias") is not None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    attended = F.scaled_dot_product_attention(
        query.reshape(batch, kv_heads, heads // kv_heads, head_dim), key, value, attn_mask=attention_mask, scale=scaling
    )
    return attended.reshape(batch, 1, heads, value.shape[-1]), None


@contextmanager
def grouped_decode(model: Any) -> Iterator[None]:
    """Use `grouped_decode_attention` in the block where the model is on sdpa attention; others keep theirs."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        yield
        return
    AttentionInterface.register(GROUPED_DECODE, grouped_decode_attention)
    AttentionMaskInterface.register(GROUPED_DECODE, sdpa_mask)
    model.set_attn_implementation(GROUPED_DECODE)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """No gradients, evaluation mode; the mode of every submodule is put back."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
