"""Optimiser, learning-rate schedules and the moving average of weights."""

from rft_trainer.optim.adamw import AdamWConfig, begin_state, build_adamw, freeze_prefixes, parameter_groups
from rft_trainer.optim.moving_average import MovingAverage
from rft_trainer.optim.schedules import SCHEDULES, ScheduleConfig, build_schedule, reschedule

__all__ = [
    "SCHEDULES",
    "AdamWConfig",
    "MovingAverage",
    "ScheduleConfig",
    "begin_state",
    "build_adamw",
    "build_schedule",
    "freeze_prefixes",
    "parameter_groups",
    "reschedule",
]
