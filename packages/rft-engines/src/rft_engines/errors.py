"""The error family of rft-engines.

Every error derives from `EngineError` and from the standard-library error it refines, so that a caller may catch
either. All of them take one message and are picklable, because they cross processes.
"""


class EngineError(Exception):
    """Base of every error this package raises on purpose."""


class EngineStateError(EngineError, RuntimeError):
    """A call that the engine's present state does not allow; the message says which call is missing."""


class InvalidRequestError(EngineError, ValueError):
    """A request no engine could serve: empty prompt, id outside the vocabulary, budget below one."""


class PromptTooLongError(InvalidRequestError):
    """A prompt that leaves no room for one new token within `max_model_len`."""


class MissingExtraError(EngineError, ImportError):
    """An engine whose optional dependency is not installed."""


class UnsupportedCombinationError(EngineError, NotImplementedError):
    """Two features that do not work together; the message names both."""


class MissingLogProbError(EngineError, LookupError):
    """The engine's answer lacks the log-probability of the token it sampled."""


class EngineDiedError(EngineError, RuntimeError):
    """The engine's process ended or stopped answering."""


class EngineStartError(EngineError, RuntimeError):
    """The engine could not be started."""
