"""Cutting a batch by tokens so that every rank runs the same number of micro-batches."""

from collections.abc import Sequence

import torch.distributed as dist

from rft_dist.agreement import raise_together
from rft_dist.errors import ConfigurationError
from rft_dist.exchange import agree_maximum


def balanced_micro_batches(
    lengths: Sequence[int], max_tokens: int, group: dist.ProcessGroup | None = None
) -> list[list[int]]:
    """Indices of this rank's items, cut into micro-batches of at most max_tokens. Collective over the group.

    Longest items are placed first. The number of micro-batches is the largest that a rank of the group needs, agreed by
    one reduction; a rank that needs fewer spreads its items over more of them, and one with too few items gets
    empty lists at the end: there it runs a padding micro-batch whose loss has zero weight.

    Args:
        lengths: tokens of each item, padding not counted.
        max_tokens: budget of one micro-batch. An item longer than that gets a micro-batch of its own.
        group: the ranks that must run equally many; None means the default group, or this process alone without one.

    Returns:
        Micro-batches of ascending indices, the one with the most tokens first; each index once.

    Raises:
        ConfigurationError: (a ValueError) a length or the budget is no whole number of tokens; on every rank.
    """
    error: ConfigurationError | None = None
    needed = 0
    try:
        _check(lengths, max_tokens)
        needed = len(_first_fit(lengths, max_tokens))
    except ConfigurationError as failure:
        error = failure
    # One reduction for both facts: the second maximum says whether a rank failed.
    agreed, failed = agree_maximum([needed, int(error is not None)], group)
    if failed:
        raise_together(error, group)
    bins = _spread(lengths, max_tokens, agreed)
    bins.sort(key=lambda indices: -sum(lengths[i] for i in indices))
    return [sorted(indices) for indices in bins] + [[] for _ in range(agreed - len(bins))]


def _check(lengths: Sequence[int], max_tokens: int) -> None:
    if type(max_tokens) is not int or max_tokens < 1:
        raise ConfigurationError(f"max_tokens={max_tokens!r} is no budget: give a whole number of tokens from 1 up")
    for index, length in enumerate(lengths):
        if type(length) is not int or length < 1:
            raise ConfigurationError(
                f"lengths[{index}]={length!r} is no length: give whole numbers from 1 up; leave empty items out"
            )


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """First fit, longest first: the fewest micro-batches that this rank is known to need."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(lengths):
        length = lengths[index]
        target = next((b for b, left in enumerate(room) if length <= left), None)
        if target is None:
            bins.append([index])
            room.append(max_tokens - length)
        else:
            bins[target].append(index)
            room[target] -= length
    return bins


def _spread(lengths: Sequence[int], max_tokens: int, count: int) -> list[list[int]]:
    """Non-empty micro-batches, `count` or as many as there are items for, of loads as even as a greedy rule makes."""
    wanted = min(count, len(lengths))
    if wanted == 0:
        return []
    bins: list[list[int]] = [[] for _ in range(wanted)]
    loads = [0] * wanted
    for index in _longest_first(lengths):
        lightest = min(range(wanted), key=loads.__getitem__)
        if bins[lightest] and loads[lightest] + lengths[index] > max_tokens:
            # The even rule found no room where first fit does: split first fit's micro-batches instead.
            return _split(_first_fit(lengths, max_tokens), lengths, wanted)
        bins[lightest].append(index)
        loads[lightest] += lengths[index]
    return bins


def _split(bins: list[list[int]], lengths: Sequence[int], wanted: int) -> list[list[int]]:
    """Halves the heaviest micro-batch that can be halved until there are as many as wanted."""
    while len(bins) < wanted:
        heaviest = max((b for b in bins if len(b) > 1), key=lambda b: sum(lengths[i] for i in b))
        bins.remove(heaviest)
        halves: tuple[list[int], list[int]] = ([], [])
        for index in heaviest:  # longest first, so the second item opens the second half
            min(halves, key=lambda half: sum(lengths[i] for i in half)).append(index)
        bins.extend(halves)
    return bins
