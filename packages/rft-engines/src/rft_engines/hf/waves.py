"""Which requests are decoded together: a plan made before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Wave:
    """Requests decoded together, longest prompt first.

    Attributes:
        places: places of the requests in the call.
        prompt_width: tokens of the longest prompt.
        width: columns each row needs, prompt and response.
    """

    places: tuple[int, ...]
    prompt_width: int
    width: int


def plan_waves(
    prompt_lengths: Sequence[int], budgets: Sequence[int], *, samples: int, max_rows: int, max_tokens: int
) -> list[Wave]:
    """Cut requests, sorted by prompt length, into waves of at most `max_rows` rows and `max_tokens` cache columns.

    A row takes the wave's whole width (longest prompt plus largest budget). A request is never split: one that alone
    is over a limit is a wave of its own.
    """
    order = sorted(range(len(prompt_lengths)), key=lambda place: (-prompt_lengths[place], place))
    waves: list[Wave] = []
    taken: list[int] = []
    prompt_width = budget = 0
    for place in order:
        longest, largest = max(prompt_width, prompt_lengths[place]), max(budget, budgets[place])
        rows = (len(taken) + 1) * samples
        if taken and (rows > max_rows or rows * (longest + largest) > max_tokens):
            waves.append(Wave(tuple(taken), prompt_width, prompt_width + budget))
            taken, longest, largest = [], prompt_lengths[place], budgets[place]
        taken.append(place)
        prompt_width, budget = longest, largest
    if taken:
        waves.append(Wave(tuple(taken), prompt_width, prompt_width + budget))
    return waves


def plan_prefill(prompt_lengths: Sequence[int], *, max_tokens: int) -> list[range]:
    """Consecutive prompts (sorted, longest first) prefilled in one forward of at most `max_tokens` padded tokens."""
    chunks: list[range] = []
    begin = 0
    for place in range(1, len(prompt_lengths) + 1):
        full = place < len(prompt_lengths) and (place - begin + 1) * prompt_lengths[begin] > max_tokens
        if place == len(prompt_lengths) or full:
            chunks.append(range(begin, place))
            begin = place
    return chunks


def common_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Tokens that all prompts begin with, leaving each at least one of its own."""
    limit = min(len(prompt) for prompt in prompts) - 1
    # What the first and the last in order share, all between them share.
    first, last = min(prompts), max(prompts)
    return next((place for place in range(limit) if first[place] != last[place]), limit)


def equal_runs(lengths: Sequence[int]) -> list[range]:
    """Places of consecutive equal lengths."""
    starts = [place for place, length in enumerate(lengths) if place == 0 or lengths[place - 1] != length]
    return [range(start, stop) for start, stop in pairwise([*starts, len(lengths)])]
