"""Shaping terms: length and repetition. Each is a reward function of its own, so each shows in the logged total."""

from collections.abc import Sequence
from dataclasses import dataclass

from rft_rewards.sample import RewardSample


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """Reward function made by `overlong_penalty`."""

    max_tokens: int
    buffer_tokens: int
    factor: float = 1.0
    name: str = "overlong"

    def __post_init__(self) -> None:
        if not 0 < self.buffer_tokens <= self.max_tokens:
            raise ValueError(
                f"buffer_tokens is {self.buffer_tokens} with max_tokens {self.max_tokens}: give 1 to max_tokens; "
                "leave the penalty out of the recipe to switch it off"
            )
        if not self.factor >= 0:
            raise ValueError(f"factor is {self.factor}: give 0 or more, the penalty is subtracted")

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self.penalty(len(sample.response_ids)) for sample in samples]

    def penalty(self, length: int) -> float:
        """Penalty of a response of `length` tokens, from 0 down to -factor."""
        excess = length - (self.max_tokens - self.buffer_tokens)
        return -self.factor * min(1.0, max(0, excess) / self.buffer_tokens) if excess > 0 else 0.0


def overlong_penalty(
    max_tokens: int, buffer_tokens: int, factor: float = 1.0, *, name: str = "overlong"
) -> OverlongPenalty:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, equation 13).

    0 up to `max_tokens - buffer_tokens` response tokens, then linearly down to `-factor` at `max_tokens`, and
    `-factor` beyond.

    Raises:
        ValueError: `buffer_tokens` is not within 1 and `max_tokens`, or `factor` is negative.
    """
    return OverlongPenalty(max_tokens=max_tokens, buffer_tokens=buffer_tokens, factor=factor, name=name)
