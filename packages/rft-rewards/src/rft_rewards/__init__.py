"""Scoring of model responses: answers, format, shaping, reward models."""

from rft_rewards.accuracy import ExactAnswer, exact_answer
from rft_rewards.backoff import RetryPolicy
from rft_rewards.engine import RewardComputationEngine
from rft_rewards.errors import (
    GraderError,
    IncompleteSampleError,
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
from rft_rewards.judging import JudgePrompt
from rft_rewards.limited import time_limited
from rft_rewards.local_model import HFRewardModel
from rft_rewards.protocols import RewardFunction, RewardModel
from rft_rewards.recipe import RewardRecipe
from rft_rewards.remote import ChatJudge, RemoteRewardModel
from rft_rewards.residency import DeviceTurn, ModelResidency
from rft_rewards.sample import RewardSample
from rft_rewards.score import RewardResult, Score
from rft_rewards.shaping import length_penalty, overlong_penalty, repetition_penalty
from rft_rewards.whole_response import SymbolicAnswer, symbolic_answer
from rft_rewards.workers import WorkerPool

__all__ = [
    "ChatJudge",
    "DeviceTurn",
    "ExactAnswer",
    "ExtractionPolicy",
    "FormatTemplate",
    "Grader",
    "GraderError",
    "HFRewardModel",
    "IncompleteSampleError",
    "InvalidScoreError",
    "JudgePrompt",
    "MissingExtraError",
    "MissingReferenceError",
    "ModelResidency",
    "RecipeError",
    "RemoteRewardError",
    "RemoteRewardModel",
    "RetryPolicy",
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
    "SymbolicAnswer",
    "UnknownLabelError",
    "Verdict",
    "WorkerPool",
    "answers_match",
    "exact_answer",
    "extract_boxed",
    "extract_gsm8k",
    "gsm8k_reference",
    "has_format",
    "length_penalty",
    "overlong_penalty",
    "repetition_penalty",
    "symbolic_answer",
    "time_limited",
]
