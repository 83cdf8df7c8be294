"""Experiences: from prompts to what the update learns from."""

from rft_trainer.experience.experience import Collator, Experience, ExperienceBatch
from rft_trainer.experience.maker import FastExperienceMaker
from rft_trainer.experience.micro_batches import MicroBatchPlanner

__all__ = ["Collator", "Experience", "ExperienceBatch", "FastExperienceMaker", "MicroBatchPlanner"]
