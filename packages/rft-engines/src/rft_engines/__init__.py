"""vLLM, SGLang and an embedded engine behind one rollout contract."""

from rft_engines.config import EngineConfig
from rft_engines.contract import Fate, LevelEffect, SleepContract, SleepLevel, sleep_contract
from rft_engines.errors import (
    EngineDiedError,
    EngineError,
    EngineStartError,
    EngineStateError,
    InvalidRequestError,
    MissingExtraError,
    MissingLogProbError,
    PromptTooLongError,
    UnsupportedCombinationError,
)
from rft_engines.factory import create_engine
from rft_engines.generation import (
    FinishReason,
    Generation,
    GenerationRequest,
    continuation,
    split_by_length,
)
from rft_engines.hf import HFEngine
from rft_engines.lifecycle import ManagedEngine
from rft_engines.protocol import EngineState, RolloutEngine
from rft_engines.rollout import gather_and_generate
from rft_engines.sampling import SamplingParams
from rft_engines.seeds import request_seed, sample_seed

__all__ = [
    "EngineConfig",
    "EngineDiedError",
    "EngineError",
    "EngineStartError",
    "EngineState",
    "EngineStateError",
    "Fate",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "HFEngine",
    "InvalidRequestError",
    "LevelEffect",
    "ManagedEngine",
    "MissingExtraError",
    "MissingLogProbError",
    "PromptTooLongError",
    "RolloutEngine",
    "SamplingParams",
    "SleepContract",
    "SleepLevel",
    "UnsupportedCombinationError",
    "continuation",
    "create_engine",
    "gather_and_generate",
    "request_seed",
    "sample_seed",
    "sleep_contract",
    "split_by_length",
]
