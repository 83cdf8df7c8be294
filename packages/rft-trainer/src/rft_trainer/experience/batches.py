"""Rows of different lengths as padded tensors: token ids, masks, positions, and values back to rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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


def position_ids_from_mask(mask: Tensor) -> Tensor:
    """[B, T] int64 positions: real tokens count 0, 1, 2, ... on either padding side; padding gets 0."""
    present = mask.bool()
    return (present.long().cumsum(dim=1) - 1).clamp(min=0) * present


def cut_at_stop(token_ids: Tensor, stop_ids: Collection[int]) -> tuple[Tensor, bool]:
    """The response [n] up to its first stop token, that one included, and whether it was truncated.

    Args:
        token_ids: [t] response tokens, with or without padding behind the stop token.
        stop_ids: all ids that end a response; models have one or several.

    Returns:
        (ids [n], truncated). Without a stop token the ids come back unchanged and truncated is True. Tokens behind the
        first stop token are dropped, never masked in between.
    """
    is_stop = torch.isin(token_ids, torch.tensor(sorted(stop_ids), dtype=token_ids.dtype, device=token_ids.device))
    hits = is_stop.nonzero()
    return (token_ids, True) if len(hits) == 0 else (token_ids[: int(hits[0]) + 1], False)


def join_prompt_response(
    prompts: Sequence[Tensor], responses: Sequence[Tensor], pad_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts padded in front and responses padded behind, in one tensor [B, P + T].

    Args:
        prompts: token ids per row.
        responses: token ids per row, as sampled; an empty one is allowed.
        pad_id: fills both paddings.

    Returns:
        (input ids [B, P + T], attention mask [B, P + T] bool, response mask [B, T] bool). Column P - 1 + t of the
        model's
        output predicts response token t, in every row: `response_hidden` cuts it out.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses; give one response per prompt")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt without tokens predicts no first response token; start it with the BOS token")
    prompt_ids, prompt_mask = left_pad(prompts, pad_id)
    response_ids, response_mask = right_pad(responses, pad_id)
    ids = torch.cat([prompt_ids, response_ids], dim=1)
    return ids, torch.cat([prompt_mask, response_mask], dim=1), response_mask


def response_hidden(values: Tensor, response_length: int) -> Tensor:
    """[B, T, ...] of the model's output [B, P + T, ...]: position t predicts response token t (T = response_length)."""
    last = values.shape[1] - 1
    if not 0 <= response_length <= last:
        raise ValueError(f"{response_length} response tokens do not fit behind a prompt in {values.shape[1]} columns")
    return values[:, last - response_length : last]
