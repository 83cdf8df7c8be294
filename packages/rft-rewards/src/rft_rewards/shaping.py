"""Shaping terms: length and repetition. Each is a reward function of its own, so each shows in the logged total."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rft_rewards.errors import IncompleteSampleError
from rft_rewards.sample import RewardSample


def response_length(name: str, sample: RewardSample) -> int:
    """Number of response tokens of `sample`, for the function `name`.

    Raises:
        IncompleteSampleError: there is text but there are no token ids.
    """
    if sample.response and not sample.response_ids:
        raise IncompleteSampleError(f"{name} counts tokens, and RewardSample.response_ids is empty: give the ids")
    return len(sample.response_ids)


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
        _check_not_negative("factor", self.factor)

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self.penalty(response_length(self.name, sample)) for sample in samples]

    def penalty(self, length: int) -> float:
        """Penalty of a response of `length` tokens, from 0 down to -factor."""
        excess = length - (self.max_tokens - self.buffer_tokens)
        return -self.factor * min(1.0, excess / self.buffer_tokens) if excess > 0 else 0.0


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


@dataclass(frozen=True, kw_only=True)
class LengthPenalty:
    """Reward function made by `length_penalty`."""

    free_tokens: int
    per_token: float
    floor: float = -1.0
    name: str = "length"

    def __post_init__(self) -> None:
        _check_not_negative("free_tokens", self.free_tokens)
        _check_not_negative("per_token", self.per_token)
        _check_not_negative("-floor", -self.floor)

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        lengths = [response_length(self.name, sample) for sample in samples]
        return [max(self.floor, -self.per_token * max(0, length - self.free_tokens)) + 0.0 for length in lengths]


def length_penalty(free_tokens: int, per_token: float, *, floor: float = -1.0, name: str = "length") -> LengthPenalty:
    """Price of length: 0 up to `free_tokens` response tokens, `-per_token` for each further one, down to `floor`.

    Raises:
        ValueError: `free_tokens` or `per_token` is negative, or `floor` is positive.
    """
    return LengthPenalty(free_tokens=free_tokens, per_token=per_token, floor=floor, name=name)


@dataclass(frozen=True, kw_only=True)
class RepetitionPenalty:
    """Reward function made by `repetition_penalty`."""

    window: int
    factor: float = 1.0
    name: str = "repetition"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window is {self.window}: give 1 or more")
        _check_not_negative("factor", self.factor)

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [self._penalty(sample.response_ids or sample.response.split()) for sample in samples]

    def _penalty(self, units: Sequence[Hashable]) -> float:
        windows = len(units) - self.window + 1
        if windows < 1:
            return 0.0
        distinct = len({tuple(units[start : start + self.window]) for start in range(windows)})
        return -self.factor * (windows - distinct) / windows + 0.0


def repetition_penalty(window: int = 20, factor: float = 1.0, *, name: str = "repetition") -> RepetitionPenalty:
    """Price of repeated n-grams (Yeo et al., arXiv:2502.03373; here per response, there per token).

    `-factor` times the share of windows of `window` tokens that occurred before in the same response; words stand in
    for tokens where a sample has no token ids. 0 for responses shorter than one window.

    Raises:
        ValueError: `window` is below 1 or `factor` is negative.
    """
    return RepetitionPenalty(window=window, factor=factor, name=name)


def _check_not_negative(field: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{field} is {value}: give 0 or more")
