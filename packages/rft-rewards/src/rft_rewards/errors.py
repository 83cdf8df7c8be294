"""Errors of rft-rewards: one family; each also derives from the standard-library error that it refines."""


class RewardError(Exception):
    """Base of every error that rft-rewards raises on purpose."""


class RecipeError(RewardError, ValueError):
    """A recipe, a weight list or a function reference is wrong; raised when it is built."""


class UnknownLabelError(RewardError, ValueError):
    """A sample carries a label that no recipe serves."""


class MissingReferenceError(RewardError, ValueError):
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
    """A remote reward model gave no score for at least one sample within its budget of tries and time."""


class RewardModelError(RewardError, RuntimeError):
    """A local reward model cannot score: template, tokenizer or head do not fit."""
