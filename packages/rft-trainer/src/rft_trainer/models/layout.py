"""How responses lie in the rows that a model sees: padded, packed end to end, or behind their common prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rft_trainer.models.padding import left_pad, position_ids_from_mask, right_pad


@dataclass(frozen=True)
class TokenLayout:
    """R rows of L tokens that hold B responses of at most T tokens, and where each response token's score comes from.

    input_ids: [R, L] int64.
    attention_mask: [R, L] bool, real tokens; or [R, 1, L, L] bool, which columns each token may look at; or
        [1, 1, 1, 1] for packed rows, whose bounds are in `cumulative_lengths`.
    position_ids: [R, L] int64; every response counts on from the end of its prompt.
    predictors: [B, T] int64 in [0, R * L): the flat place of the token before, whose hidden state predicts this one.
    labels: [B, T] int64.
    mask: [B, T] bool, where a response token stands.
    cells: [N] int64, the flat places of those N tokens in [B, T], row by row: what a GPU would have to be waited for to
        find them by the mask.
    cumulative_lengths: [B + 1] int32 (0, l_0, l_0 + l_1, ...) of packed rows, None for the other layouts.
    longest: tokens of the longest packed row.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    predictors: Tensor
    labels: Tensor
    mask: Tensor
    cells: Tensor
    cumulative_lengths: Tensor | None = None
    longest: int = 0

    def to(self, device: torch.device) -> "TokenLayout":
        """The same on another device."""
        tensors: dict[str, Any] = {
            n: to_device(value, device) for n, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


def padded_layout(
    prompts: Sequence[Tensor], responses: Sequence[Tensor], pad_token_id: int, *, side: str = "right"
) -> TokenLayout:
    """One row per response: prompt and response, padded on one `side`.

    Args:
        prompts: B tensors [P_i] int64, at least one token each.
        responses: B tensors [T_i] int64, possibly empty.
        side: "right" or "left".

    Raises:
        ValueError: an empty prompt, or prompts and responses differ in number.
    """
    _check(prompts, responses)
    pad = left_pad if side == "left" else right_pad
    input_ids, attention_mask = pad([torch.cat(pair) for pair in zip(prompts, responses, strict=True)], pad_token_id)
    width = input_ids.shape[1]
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    offsets = [width - length if side == "left" else 0 for length in lengths]
    starts = [
        number * width + offset + len(prompt) - 1
        for number, (prompt, offset) in enumerate(zip(prompts, offsets, strict=True))
    ]
    predictors = [start + torch.arange(len(response)) for start, response in zip(starts, responses, strict=True)]
    labels, mask = right_pad(responses, 0)
    return TokenLayout(
        input_ids=input_ids,
        attention_mask=attention_mask,
        # Positions count real tokens only, so left and right padding give the same numbers.
        position_ids=position_ids_from_mask(attention_mask),
        predictors=right_pad(predictors, 0)[0],
        labels=labels,
        mask=mask,
        cells=_cells(responses),
    )


def packed_layout(prompts: Sequence[Tensor], responses: Sequence[Tensor], pad_token_id: int) -> TokenLayout:
    """One row for all: prompts and responses end to end, without padding, positions restarting at 0 in each.

    `pad_token_id` is not used: the layouts share one signature.

    Raises:
        ValueError: as `padded_layout`.
    """
    _check(prompts, responses)
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    edges = torch.tensor([0, *lengths]).cumsum(0)
    predictors = [
        int(end) - len(response) - 1 + torch.arange(len(response))
        for end, response in zip(edges[1:], responses, strict=True)
    ]
    labels, mask = right_pad(responses, 0)
    return TokenLayout(
        input_ids=torch.cat([part for pair in zip(prompts, responses, strict=True) for part in pair])[None],
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        predictors=right_pad(predictors, 0)[0],
        labels=labels,
        mask=mask,
        cells=_cells(responses),
        cumulative_lengths=edges.int(),
        longest=max(lengths),
    )


def shared_prompt_layout(prompts: Sequence[Tensor], responses: Sequence[Tensor], pad_token_id: int) -> TokenLayout:
    """One row per run of equal prompts: the prompt once, then its responses side by side, blind to each other.

    A group of n responses costs P + n * T tokens instead of n * (P + T); the scores are the same numbers. The mask is
    R x L x L, so this pays for short responses to long prompts.

    Raises:
        ValueError: as `padded_layout`.
    """
    _check(prompts, responses)
    runs: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        if runs and torch.equal(prompts[runs[-1][0]], prompt):
            runs[-1].append(number)
        else:
            runs.append([number])
    rows = [torch.cat([prompts[run[0]], *(responses[i] for i in run)]) for run in runs]
    input_ids, _ = right_pad(rows, pad_token_id)
    width = input_ids.shape[1]
    # A padding token looks at itself, because a softmax over nothing is not a number; nothing looks at it.
    allowed = torch.eye(width, dtype=torch.bool).repeat(len(rows), 1, 1)
    position_ids = torch.zeros(len(rows), width, dtype=torch.long)
    predictors: list[Tensor] = []
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    for row, run in enumerate(runs):
        length = len(prompts[run[0]])
        allowed[row, :length, :length] = causal[:length, :length]
        position_ids[row, :length] = torch.arange(length)
        start = length
        for i in run:
            end = start + len(responses[i])
            allowed[row, start:end, :length] = True
            allowed[row, start:end, start:end] = causal[: end - start, : end - start]
            position_ids[row, start:end] = torch.arange(length, length + end - start)
            before = torch.arange(start - 1, end - 1)
            before[:1] = length - 1
            predictors.append(row * width + before)
            start = end
    labels, mask = right_pad(responses, 0)
    return TokenLayout(
        input_ids=input_ids,
        attention_mask=allowed[:, None],
        position_ids=position_ids,
        predictors=right_pad(predictors, 0)[0],
        labels=labels,
        mask=mask,
        cells=_cells(responses),
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; a copy to a GPU goes through pinned memory, so that nobody waits for it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _cells(responses: Sequence[Tensor]) -> Tensor:
    width = max(len(response) for response in responses)
    return torch.cat([row * width + torch.arange(len(response)) for row, response in enumerate(responses)])


def _check(prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> None:
    if len(prompts) != len(responses) or not prompts:
        raise ValueError(
            f"{len(prompts)} prompts and {len(responses)} responses: give one of each for every row, at least one"
        )
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt is empty: nothing would predict the first response token; give at least one token")
