"""Strategies: distributed set-up, training backends, engine life cycle and weight sync."""

from rft_trainer.strategy.data_parallel import WorldDataParallel
from rft_trainer.strategy.deepspeed import DeepspeedBackend
from rft_trainer.strategy.facade import DeepspeedStrategy, FSDPV2Strategy, Strategy, get_strategy
from rft_trainer.strategy.fsdp import FSDPBackend
from rft_trainer.strategy.protocols import (
    DataParallel,
    Residency,
    RolloutRuntime,
    StepReport,
    TrainingBackend,
    TrainState,
)
from rft_trainer.strategy.rollout import EngineRuntime

__all__ = [
    "DataParallel",
    "DeepspeedBackend",
    "DeepspeedStrategy",
    "EngineRuntime",
    "FSDPBackend",
    "FSDPV2Strategy",
    "Residency",
    "RolloutRuntime",
    "StepReport",
    "Strategy",
    "TrainState",
    "TrainingBackend",
    "WorldDataParallel",
    "get_strategy",
]
