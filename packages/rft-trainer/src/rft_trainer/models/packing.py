"""Attention over rows laid end to end: each attends to itself alone, and no [S, S] mask exists."""

import inspect
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rft_trainer.errors import UnsupportedCombination

PACKED_ATTENTION = "rft_packed"
_HALF = (torch.float16, torch.bfloat16)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers: packed rows when `cu_seq_lens_q` is given, the sdpa path otherwise.

    Half precision on CUDA runs torch's variable-length kernel; everything else runs scaled dot-product attention row by
    row, which is the block-diagonal causal mask without the blocks that are empty.

    Args:
        query: [1, heads, S, D]; key, value: [1, kv_heads, S, D].
        kwargs: `cu_seq_lens_q` [rows + 1] int32, `max_length_q` int, `sliding_window` int or None.

    Returns:
        ([1, S, heads, D], None).

    Raises:
        UnsupportedCombination: the model passes no `cu_seq_lens_q` on, or asks for a bias or cap on attention scores.
    """
    edges = kwargs.get("cu_seq_lens_q")
    if edges is None:
        if attention_mask is not None and attention_mask.shape[-1] != key.shape[-2]:
            raise UnsupportedCombination(
                f"packing and {type(module).__name__}: the model does not hand `cu_seq_lens_q` to its attention; "
                "leave out --packing"
            )
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    extras = [name for name in ("position_bias", "softcap", "s_aux") if kwargs.get(name) is not None]
    if extras:
        raise UnsupportedCombination(
            f"packing and {type(module).__name__}: {', '.join(extras)} of its attention is not known to packed rows; "
            "leave out --packing"
        )
    window = kwargs.get("sliding_window")
    if query.is_cuda and query.dtype in _HALF:
        return _varlen(query, key, value, edges, kwargs["max_length_q"], scaling, window), None
    return _row_by_row(query, key, value, edges.tolist(), scaling, window), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, edges: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 groups heads unasked and does not know the word; later ones want it.
    known = inspect.signature(varlen_attn).parameters
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}
    # (-1, 0) is causal; a window of W tokens includes the token itself.
    left = -1 if window is None else window - 1
    attended = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        edges,
        edges,
        longest,
        longest,
        scale=scale,
        window_size=(left, 0),
        **grouped,
    )
    assert isinstance(attended, Tensor)
    return attended[None]


def _row_by_row(
    query: Tensor, key: Tensor, value: Tensor, edges: list[int], scale: float | None, window: int | None
) -> Tensor:
    parts = []
    for start, end in pairwise(edges):
        part, size, mask = slice(start, end), end - start, None
        if window is not None and window < size:
            mask = torch.ones(size, size, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        attended = F.scaled_dot_product_attention(
            query[:, :, part],
            key[:, :, part],
            value[:, :, part],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        parts.append(attended)
    return torch.cat(parts, dim=2).transpose(1, 2)


def attend_packed(model: Any) -> None:
    """Make a transformers model on sdpa attention use `packed_attention` from now on; other batches keep their numbers.

    Raises:
        UnsupportedCombination: the model is on another attention, or cannot change it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    current = getattr(model.config, "_attn_implementation", None)
    if current == PACKED_ATTENTION:
        return
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
    # Kept for good, not only during the forward: a recomputed block asks again in backward.
    if current == "sdpa":
        model.set_attn_implementation(PACKED_ATTENTION)
    if model.config._attn_implementation != PACKED_ATTENTION:
        raise UnsupportedCombination(
            f"packing and {type(model).__name__} with attention {current!r}: only models on transformers' sdpa "
            "attention can be packed; leave out --packing"
        )
