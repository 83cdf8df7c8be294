"""Rows of different lengths as padded tensors: token ids, masks, positions, and values back to rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def left_pad(rows: Sequence[Tensor], value: float, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows [t_i] side by side with the padding in front: prompts.

    Args:
        rows: one-dimensional tensors of one dtype; empty ones are allowed.
        value: what fills the padding.
        length: columns; None takes the longest row.

    Returns:
        (values [B, T], mask [B, T] bool). The mask comes from the lengths, so a pad id that also ends sequences is
        safe.

    Raises:
        ValueError: no rows, or a row longer than `length`.
    """
    return _pad(rows, value, length, in_front=True)


def right_pad(rows: Sequence[Tensor], value: float, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows [t_i] with the padding behind: responses and everything per response token. Arguments as in `left_pad`."""
    return _pad(rows, value, length, in_front=False)


def _pad(rows: Sequence[Tensor], value: float, length: int | None, *, in_front: bool) -> tuple[Tensor, Tensor]:
    if not rows:
        raise ValueError("no rows to pad; skip an empty batch before building tensors")
    longest = max(len(row) for row in rows)
    columns = longest if length is None else length
    if longest > columns:
        raise ValueError(f"a row of {longest} tokens does not fit into {columns} columns; cut it or raise the length")
    padded = torch.full((len(rows), columns), value, dtype=rows[0].dtype, device=rows[0].device)
    mask = torch.zeros((len(rows), columns), dtype=torch.bool, device=rows[0].device)
    for index, row in enumerate(rows):
        place = slice(columns - len(row), columns) if in_front else slice(0, len(row))
        padded[index, place] = row
        mask[index, place] = True
    return padded, mask


def unpad(values: Tensor, mask: Tensor) -> list[Tensor]:
    """The unmasked values of each row, in order: the inverse of both paddings."""
    if values.shape[:2] != mask.shape:
        raise ValueError(f"values {tuple(values.shape)} must begin with the shape of mask {tuple(mask.shape)}")
    return [row[keep] for row, keep in zip(values, mask.bool(), strict=True)]


def on_host(rows: Sequence[Tensor]) -> list[Tensor]:
    """Rows [t_i] on the CPU, each with memory of its own, in one copy from their device."""
    if not rows:
        return []
    flat = torch.cat([row.reshape(-1) for row in rows]).cpu()
    parts = flat.split([row.numel() for row in rows])  # type: ignore[no-untyped-call]
    return [part.reshape(row.shape).clone() for part, row in zip(parts, rows, strict=True)]


def position_ids_from_mask(mask: Tensor) -> Tensor:
    """[B, T] int64 positions: real tokens count 0, 1, 2, ... on either padding side; padding gets 0."""
    present = mask.bool()
    return (present.long().cumsum(dim=1) - 1).clamp(min=0) * present
