"""The training loop, its update and its evaluation."""

from rft_trainer.trainer.evaluation import Evaluator, three_extractors
from rft_trainer.trainer.phases import PhaseClock
from rft_trainer.trainer.ppo import PPOTrainer
from rft_trainer.trainer.update import PolicyUpdate, UpdateConfig

__all__ = ["Evaluator", "PPOTrainer", "PhaseClock", "PolicyUpdate", "UpdateConfig", "three_extractors"]
