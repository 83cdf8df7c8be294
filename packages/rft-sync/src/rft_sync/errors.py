# ruff: noqa: N818 -- the names say what happened; the standard-library base says that it is an error
"""The errors of a weight update. Each derives from the standard-library error that it refines.

Errors cross processes (every rank raises the error of the first rank that failed), so each is built from
a message and a tuple of tensor names and survives pickling.
"""

from collections.abc import Iterable


class WeightSyncError(Exception):
    """A weight update could not be done. The receiver is unusable until a full update succeeds.

    Args:
        message: What was given, what was expected, and what to change.
        names: The tensors concerned, by checkpoint name.
    """

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        self.message = message
        self.names = tuple(names)
        super().__init__(message, self.names)

    def __str__(self) -> str:
        """The message alone; `names` stays an attribute."""
        return self.message


class ManifestMismatch(WeightSyncError, ValueError):
    """Ranks, or sender and receiver, disagree about what is to be sent."""


class UnknownTensor(WeightSyncError, KeyError):
    """A tensor that one side has and the other does not."""


class ShapeMismatch(WeightSyncError, ValueError):
    """A tensor has another shape or dtype than its destination allows."""


class IncompleteGroup(WeightSyncError, ValueError):
    """Tensors that the engine fuses (q+k+v, gate+up, the experts of a layer) were not sent together."""


class NonFiniteWeight(WeightSyncError, ArithmeticError):
    """A weight holds NaN or Inf."""


class EngineNotReady(WeightSyncError, RuntimeError):
    """The engine sleeps, generates, is gone, or is inside another update."""


class EngineRefused(WeightSyncError, RuntimeError):
    """The engine answered that it did not take the weights."""


class VerificationFailed(WeightSyncError, RuntimeError):
    """What the engine holds is not what was sent."""


class UnsupportedCombination(WeightSyncError, NotImplementedError):
    """Two features that do not work together; the message names both."""
