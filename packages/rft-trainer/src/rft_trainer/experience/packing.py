"""Several rows in one, without padding: each row attends to itself alone and its positions start at 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rft_trainer.models.padding import right_pad


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Rows laid end to end.

    Attributes:
        input_ids: [1, S] token ids, S the sum of the lengths.
        position_ids: [1, S] int64, restarting at 0 in each row. A transformers model with batch size 1, restarting
            positions and no attention mask keeps the rows apart by itself.
        segment_ids: [1, S] int64, the row each token belongs to.
        lengths: tokens of each row.
    """

    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    lengths: tuple[int, ...]

    @property
    def cumulative_lengths(self) -> Tensor:
        """[rows + 1] int32 (0, l_0, l_0 + l_1, ...) for variable-length attention kernels."""
        edges = torch.tensor((0, *self.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return edges.to(self.input_ids.device)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    def attention_mask(self) -> Tensor:
        """[1, 1, S, S] bool, True where attention is allowed: block-diagonal and causal, for SDPA.

        Memory grows with S squared; kernels for variable lengths take `cumulative_lengths` instead.
        """
        row = self.segment_ids[0]
        size = row.shape[0]
        causal = torch.ones(size, size, dtype=torch.bool, device=row.device).tril()
        return ((row[:, None] == row[None, :]) & causal)[None, None]

    def prediction_index(self, response_lengths: Sequence[int]) -> Tensor:
        """Flat columns of the packed output that predict the response tokens, [sum of response_lengths] int64.

        Column c of the output predicts token c + 1 of the same row, so the last `n` tokens of a row are predicted by
        the n columns that end one before its last. `input_ids[0, index + 1]` are the labels.

        Raises:
            ValueError: not one length per row, or a response that leaves no prompt token in front of it.
        """
        if len(response_lengths) != len(self.lengths):
            raise ValueError(f"{len(response_lengths)} response lengths for {len(self.lengths)} packed rows")
        parts, end = [], 0
        for row, (length, response) in enumerate(zip(self.lengths, response_lengths, strict=True)):
            end += length
            if not 0 <= response < length:
                raise ValueError(
                    f"row {row} has {length} tokens, {response} of them a response; at least one prompt token is needed"
                )
            parts.append(torch.arange(end - response - 1, end - 1))
        return torch.cat(parts).to(self.input_ids.device)


def pack(rows: Sequence[Tensor]) -> PackedBatch:
    """Lay token-id rows [t_i] end to end.

    Raises:
        ValueError: no rows, or a row without tokens.
    """
    lengths = tuple(len(row) for row in rows)
    if not lengths or 0 in lengths:
        raise ValueError(f"rows of {list(lengths)} tokens cannot be packed; drop the empty ones")
    device = rows[0].device
    return PackedBatch(
        input_ids=torch.cat(list(rows))[None],
        position_ids=torch.cat([torch.arange(length, device=device) for length in lengths])[None],
        segment_ids=torch.repeat_interleave(
            torch.arange(len(rows), device=device), torch.tensor(lengths, device=device)
        )[None],
        lengths=lengths,
    )


def unpack(
    values: Tensor, lengths: Sequence[int], *, length: int | None = None, value: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Packed values back to rows, padded behind.

    Args:
        values: [S] or [1, S], S the sum of `lengths`; gradients flow through.
        lengths: values of each row; 0 is allowed.
        length: columns; None takes the longest row.
        value: what fills the padding.

    Returns:
        (values [B, T], mask [B, T] bool).

    Raises:
        ValueError: S is not the sum of the lengths, or a row is longer than `length`.
    """
    flat = values.reshape(-1)
    if flat.shape[0] != sum(lengths):
        raise ValueError(f"{flat.shape[0]} packed values do not split into rows of {list(lengths)}")
    return right_pad(list(torch.split(flat, list(lengths))), value, length)
