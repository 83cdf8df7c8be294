"""Problems from files and hubs, prompts from problems, and the order in which they are drawn."""

from rft_trainer.data.prompts import PromptFormat, PromptRecord, render_prompts
from rft_trainer.data.records import Problem, load_problems
from rft_trainer.data.sampler import DataSampler

__all__ = ["DataSampler", "Problem", "PromptFormat", "PromptRecord", "load_problems", "render_prompts"]
