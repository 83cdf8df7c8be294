"""The two protocols that a scorer can meet."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from rft_rewards.sample import RewardSample
from rft_rewards.score import Score

RawScore: TypeAlias = "Score | float | int | Mapping[str, Any] | Any | None"
"""A `Score`, any number (Python, numpy scalar, tensor of one element), a mapping with the key `score`, or None."""


class RewardFunction(Protocol):
    """Any callable from a batch of samples to as many scores, in the same order.

    It may be a plain function or a coroutine function; coroutines of one batch run at the same time. The name under
    which its scores are reported is its attribute `name`, else its `__name__`.
    """

    def __call__(self, samples: Sequence[RewardSample], /) -> Sequence[RawScore] | Awaitable[Sequence[RawScore]]:
        """Score `samples`; the result has the same length and order."""


@runtime_checkable
class RewardModel(Protocol):
    """A reward function with weights that come to the device for its turn and leave after it.

    `RewardComputationEngine` calls `load`, the model, `release` for one model after the other, and only for models
    which a sample of the batch needs, so that at most one is resident.
    """

    name: str

    def __call__(self, samples: Sequence[RewardSample], /) -> Sequence[RawScore]:
        """Score `samples`; only called between `load` and `release`."""

    def load(self) -> None:
        """Bring the weights to the device."""

    def release(self) -> None:
        """Take the weights off the device; called also after a failure."""
