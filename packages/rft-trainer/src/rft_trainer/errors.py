"""The error family of rft-trainer: every error derives from `RFTrainerError` and from the built-in error it refines."""


class RFTrainerError(Exception):
    """Base of every error that rft-trainer raises on purpose."""


class ConfigurationError(RFTrainerError, ValueError):
    """The configuration, the data or the model folder cannot be used as given; the message says what to change."""


class UnsupportedCombination(RFTrainerError, NotImplementedError):  # noqa: N818
    """Two choices that are valid alone do not work together; the message names both."""


class NumericalError(RFTrainerError, FloatingPointError):
    """A loss, gradient or log-probability is not finite."""
