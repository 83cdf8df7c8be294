"""What a run tells: metrics, rollouts and console lines."""

from rft_trainer.report.console import Column, Console, PhaseProgress
from rft_trainer.report.metrics import JsonlLogger, LoggerGroup, MetricLogger, TensorBoardLogger, WandbLogger
from rft_trainer.report.rollouts import Rollout, RolloutWriter, token_texts

__all__ = [
    "Column",
    "Console",
    "JsonlLogger",
    "LoggerGroup",
    "MetricLogger",
    "PhaseProgress",
    "Rollout",
    "RolloutWriter",
    "TensorBoardLogger",
    "WandbLogger",
    "token_texts",
]
