"""Reinforcement fine-tuning of language models under plain torchrun."""

from rft_trainer.config import OptimizerConfig, RFTConfig
from rft_trainer.errors import (
    CheckpointError,
    ConfigurationError,
    NumericalError,
    RFTrainerError,
    StaleWeightsError,
    UnsupportedCombination,
)

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "NumericalError",
    "OptimizerConfig",
    "RFTConfig",
    "RFTrainerError",
    "StaleWeightsError",
    "UnsupportedCombination",
]
