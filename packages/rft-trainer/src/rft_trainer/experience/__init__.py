"""Experiences: from prompts to what the update learns from."""

from rft_trainer.experience.experience import Experience, ExperienceBatch, collate
from rft_trainer.experience.maker import FastExperienceMaker
from rft_trainer.experience.micro_batches import MicroBatchPlanner

__all__ = ["Experience", "ExperienceBatch", "FastExperienceMaker", "MicroBatchPlanner", "collate"]
