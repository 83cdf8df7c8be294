"""Settings of a run, by group."""

from rft_trainer.config.run_config import OptimizerConfig, RFTConfig

__all__ = ["OptimizerConfig", "RFTConfig"]
