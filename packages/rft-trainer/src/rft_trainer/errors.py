"""Errors of rft-trainer: one base, each refined error also derives from the standard-library error it replaces."""


class RFTrainerError(Exception):
    """Base of every error that rft-trainer raises on purpose."""


class ConfigurationError(RFTrainerError, ValueError):
    """A setting that cannot work; the message names the setting, its value and the remedy."""


class InvalidSettings(ConfigurationError):  # noqa: N818
    """Settings of a run that cannot be made; `settings` holds them, for whoever looks for further problems."""

    def __init__(self, message: str, settings: object = None) -> None:
        super().__init__(message)
        self.settings = settings


class UnsupportedCombination(RFTrainerError, NotImplementedError):  # noqa: N818
    """Two features that do not work together; the message names both halves."""


class NumericalError(RFTrainerError, FloatingPointError):
    """A number that must be finite is not."""


class StaleWeightsError(RFTrainerError, RuntimeError):
    """The engine's weights are older than the optimiser step and no lag is allowed."""


class ResidencyError(RFTrainerError, RuntimeError):
    """Memory that is wanted on the device is on the host."""


class RunInterrupted(RFTrainerError, RuntimeError):  # noqa: N818
    """A signal ended the run after a step; the message says where it can go on."""


class CheckpointError(RFTrainerError, RuntimeError):
    """A checkpoint that is incomplete, does not fit the run, or cannot be written."""
