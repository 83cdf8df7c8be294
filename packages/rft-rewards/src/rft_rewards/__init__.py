"""Scoring of model responses: answers, format, shaping, reward models."""

from rft_rewards.accuracy import ExactAnswer, exact_answer
from rft_rewards.engine import RewardComputationEngine
from rft_rewards.errors import (
    GraderError,
    InvalidScoreError,
    MissingExtraError,
    MissingReferenceError,
    RecipeError,
    RemoteRewardError,
    RewardError,
    RewardFunctionError,
    RewardModelError,
    UnknownLabelError,
)
from rft_rewards.extraction import ExtractionPolicy, extract_boxed, extract_gsm8k, gsm8k_reference
from rft_rewards.formatting import FormatTemplate, has_format
from rft_rewards.grading import Grader, Verdict, answers_match
from rft_rewards.protocols import RewardFunction, RewardModel
from rft_rewards.recipe import RewardRecipe
from rft_rewards.sample import RewardSample
from rft_rewards.score import RewardResult, Score
from rft_rewards.shaping import overlong_penalty

__all__ = [
    "ExactAnswer",
    "ExtractionPolicy",
    "FormatTemplate",
    "Grader",
    "GraderError",
    "InvalidScoreError",
    "MissingExtraError",
    "MissingReferenceError",
    "RecipeError",
    "RemoteRewardError",
    "RewardComputationEngine",
    "RewardError",
    "RewardFunction",
    "RewardFunctionError",
    "RewardModel",
    "RewardModelError",
    "RewardRecipe",
    "RewardResult",
    "RewardSample",
    "Score",
    "UnknownLabelError",
    "Verdict",
    "answers_match",
    "exact_answer",
    "extract_boxed",
    "extract_gsm8k",
    "gsm8k_reference",
    "has_format",
    "overlong_penalty",
]
