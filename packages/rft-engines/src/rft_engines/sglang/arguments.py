"""What SGLang is built with, and what its answers mean."""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rft_engines.config import EngineConfig
from rft_engines.end_tokens import end_token_ids
from rft_engines.errors import EngineStartError, UnsupportedCombinationError
from rft_engines.generation import FinishReason
from rft_engines.sampling import SamplingParams

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# SGLang hashes seeds as 32-bit numbers.
_SEED_LIMIT = 1 << 31
# Below this SGLang is greedy and reports the log-probabilities of temperature 1.
_LOWEST_TEMPERATURE = 1e-6
# Positions of the context that SGLang gives to no prompt.
RESERVED_POSITIONS = 6


def has_tokenizer(model_path: str) -> bool:
    """Whether the folder holds a tokenizer."""
    return any((Path(model_path) / name).is_file() for name in _TOKENIZER_FILES)


@dataclass(frozen=True)
class ModelFacts:
    """What a rank without the engine must know of the model.

    Attributes:
        vocab_size: ids a prompt may hold.
        max_position_embeddings: positions, None when unlimited.
        eos_token_ids: ids that end a sample, those of the generation config too.
        takes_images: whether it is a model of text and images.
    """

    vocab_size: int
    max_position_embeddings: int | None
    eos_token_ids: tuple[int, ...]
    takes_images: bool


def model_facts(model_path: str) -> ModelFacts:
    """Read the folder's config.json, where a model of text and images keeps its language model under text_config.

    Raises:
        EngineStartError: no such file.
    """
    path = Path(model_path, "config.json")
    if not path.is_file():
        raise EngineStartError(f"no config.json in {model_path!r}: give the folder of a saved transformers model")
    whole = json.loads(path.read_text())
    text = whole.get("text_config") or whole
    further = Path(model_path, "generation_config.json")
    generation = json.loads(further.read_text()) if further.is_file() else {}
    ends = end_token_ids(
        SimpleNamespace(eos_token_id=text.get("eos_token_id", whole.get("eos_token_id"))),
        generation_config=SimpleNamespace(eos_token_id=generation.get("eos_token_id")),
    )
    return ModelFacts(int(text["vocab_size"]), text.get("max_position_embeddings"), ends, "vision_config" in whole)


def engine_arguments(config: EngineConfig, *, seed: int, base_gpu_id: int, positions: int | None) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`, names that hold from 0.5.14 to 0.5.21.

    Args:
        config: the engine's config; its options win.
        seed: of the TP group.
        base_gpu_id: device of the group's first rank.
        positions: of the model, None when unlimited.
    """
    if config.kv_cache_bytes is not None:
        raise UnsupportedCombinationError(
            f"engine 'sglang' and kv_cache_bytes={config.kv_cache_bytes}: it counts tokens, give "
            f"options={{'max_total_tokens': ...}} or memory_utilization"
        )
    arguments: dict[str, Any] = {
        "model_path": config.model_path,
        "dtype": config.dtype,
        "tp_size": config.tp_size,
        "base_gpu_id": base_gpu_id,
        "random_seed": seed,
        # Weights and KV cache together.
        "mem_fraction_static": config.memory_utilization,
        "enable_memory_saver": config.enable_sleep,
        # Neutral sampling: nothing is filled in from the checkpoint.
        "sampling_defaults": "openai",
        "nccl_port": free_port(),
        "log_level": "warning",
        "skip_tokenizer_init": not has_tokenizer(config.model_path),
    }
    if config.max_model_len is not None:
        wanted = config.max_model_len + RESERVED_POSITIONS
        arguments["context_length"] = wanted if positions is None else min(wanted, positions)
    if config.max_rows is not None:
        arguments["max_running_requests"] = config.max_rows
    if not config.load_weights:
        arguments["load_format"] = "dummy"
    return arguments | dict(config.options)


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def refuse_unsupported(sampling: SamplingParams, max_steps: int | None, *, tokenizer: bool) -> None:
    """Refuse what SGLang would answer wrongly.

    Raises:
        UnsupportedCombinationError: truncation (its log-probabilities are those before it), a step budget, a
            temperature of the first token, or a temperature so low that SGLang takes another one.
        ValueError: stop strings without a tokenizer.
    """
    sampling.refuse_first_token_temperature("sglang")
    sampling.refuse_temperature_below(_LOWEST_TEMPERATURE, "sglang")
    if not sampling.greedy and (sampling.top_p < 1 or sampling.top_k > 0):
        raise UnsupportedCombinationError(
            f"engine 'sglang' and top_p={sampling.top_p}, top_k={sampling.top_k}: it reports log-probabilities from "
            f"before the truncation, not of the distribution sampled from; sample with top_p=1 and top_k=0"
        )
    if max_steps is not None:
        raise UnsupportedCombinationError(
            f"engine 'sglang' and max_steps={max_steps}: its steps run in another process, use abort() instead"
        )
    if sampling.stop and not tokenizer:
        raise ValueError(f"SamplingParams.stop={sampling.stop} needs text, and the model folder has no tokenizer")


def native_sampling(sampling: SamplingParams, budget: int, seed: int) -> dict[str, Any]:
    """`sampling_params` of one sample."""
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": budget,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "sampling_seed": seed % _SEED_LIMIT,
    }


def finish_reason(meta_info: Mapping[str, Any]) -> FinishReason:
    """Why a sample ended; the entry is a dict with a type, or missing on an aborted one."""
    reason = meta_info.get("finish_reason") or {"type": "abort"}
    return FinishReason(reason["type"])


def cut_at_stop(tokens: list[int], reason: FinishReason, sampling: SamplingParams) -> tuple[list[int], FinishReason]:
    """Tokens up to the first stop id and why they end.

    SGLang ends at stop ids itself, but not when it was told to go on past the end ids.
    """
    if sampling.ignore_eos:
        for place, token in enumerate(tokens):
            if token in sampling.stop_token_ids:
                return tokens[: place + 1], FinishReason.STOP
    return tokens, reason
