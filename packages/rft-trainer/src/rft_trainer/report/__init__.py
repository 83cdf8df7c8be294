"""What a run leaves behind and shows: metrics, rollouts, lines on the terminal."""

from rft_trainer.report.console import Console
from rft_trainer.report.loggers import JsonlLogger, MetricLogger, TensorBoardLogger
from rft_trainer.report.rollouts import RolloutWriter

__all__ = ["Console", "JsonlLogger", "MetricLogger", "RolloutWriter", "TensorBoardLogger"]
