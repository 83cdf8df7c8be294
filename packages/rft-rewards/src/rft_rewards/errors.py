"""Errors of rft-rewards: one family; each also derives from the standard-library error that it refines."""

from collections.abc import Sequence
from typing import Any


class RewardError(Exception):
    """Base of every error that rft-rewards raises on purpose."""


class RecipeError(RewardError, ValueError):
    """A recipe, a weight list or a function reference is wrong; raised when it is built."""


class UnknownLabelError(RewardError, ValueError):
    """A sample carries a label that no recipe serves."""


class IncompleteSampleError(RewardError, ValueError):
    """A sample lacks something that a function of its recipe needs."""


class MissingReferenceError(IncompleteSampleError):
    """A sample or a data row has no gold answer where one is needed."""


class RewardFunctionError(RewardError, RuntimeError):
    """A reward function raised; the message names the function and the samples."""


class InvalidScoreError(RewardError, ValueError):
    """A reward function returned a wrong number of scores, NaN, infinity, None or something that is no number."""


class MissingExtraError(RewardError, ImportError):
    """A feature needs an optional dependency that is not installed."""


class GraderError(RewardError, RuntimeError):
    """The worker processes of the symbolic verifier could not be started."""


class RemoteRewardError(RewardError, ConnectionError):
    """A remote reward model gave no score for at least one sample within its budget of tries and time.

    Attributes:
        scores: what was scored before the failure, in the order of the samples; None where there is no score.
    """

    def __init__(self, message: str, scores: Sequence[float | None] = ()) -> None:
        super().__init__(message)
        self.scores = tuple(scores)

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteRewardError, (str(self), self.scores))


class RewardModelError(RewardError, RuntimeError):
    """A local reward model cannot score: template, tokenizer or head do not fit."""
