"""One way to build any engine."""

import importlib.util
from typing import Any

from rft_dist import RolloutGroups
from rft_engines.combinations import NO_SGLANG_ADAPTER
from rft_engines.config import EngineConfig
from rft_engines.errors import MissingExtraError, UnsupportedCombinationError
from rft_engines.protocol import RolloutEngine


def create_engine(
    config: EngineConfig | str,
    *,
    groups: RolloutGroups | None = None,
    model: Any = None,
    tokenizer: Any = None,
    **fields: Any,
) -> RolloutEngine:
    """Build the engine a config describes: `create_engine(config)`, or `create_engine("hf", model_path=...)`.

    Collective over the world for "vllm" and over the TP group for "sglang", local for "hf".

    Args:
        config: a config, or a kind with the config's fields as keywords.
        groups: the TP and DP groups of this run; None for a single process.
        model: a module to take instead of loading `model_path` (hf only).
        tokenizer: for stop strings (hf loads it with `model_path`; the others use their own).
        **fields: fields of `EngineConfig`, only with a kind.

    Raises:
        ValueError: unknown or wrong field.
        MissingExtraError: the engine's package is not installed.
        UnsupportedCombinationError: the engine cannot do what the config asks for.
    """
    config = _config(config, fields)
    tp_size = groups.layout.engine_tp_size if groups is not None else 1
    if config.tp_size != tp_size:
        raise ValueError(
            f"EngineConfig.tp_size={config.tp_size}, but the groups have engine_tp_size={tp_size}: give both the same "
            f"number, and build the groups first where it is above 1"
        )
    if config.kind == "hf":
        seed = groups.layout.engine_seed(config.seed) if groups is not None else config.seed or 0
        return _hf_engine(config, seed, model, tokenizer)
    if model is not None:
        raise UnsupportedCombinationError(
            f"engine {config.kind!r} and a module: it loads its own copy, give model_path and send weights to it"
        )
    if config.kind == "sglang" and config.lora_rank:
        raise UnsupportedCombinationError(f"engine 'sglang' and lora_rank={config.lora_rank}: {NO_SGLANG_ADAPTER}")
    _require_extra(config.kind)
    if config.kind == "vllm":
        from rft_engines.vllm import VLLMEngine

        return VLLMEngine(config, groups=groups)
    from rft_engines.sglang import SGLangEngine

    return SGLangEngine(config, groups=groups)


def _config(config: EngineConfig | str, fields: dict[str, Any]) -> EngineConfig:
    if isinstance(config, EngineConfig):
        if fields:
            raise ValueError(f"create_engine got a config and the fields {sorted(fields)}: put them into the config")
        return config
    unknown = sorted(set(fields) - set(EngineConfig.field_names()))
    if unknown:
        raise ValueError(
            f"create_engine got the unknown fields {unknown}: known are {EngineConfig.field_names()}; the engine's own "
            f"arguments go into options={{...}}"
        )
    return EngineConfig(kind=config, **fields)


def _require_extra(kind: str) -> None:
    if importlib.util.find_spec(kind) is None:
        name = {"vllm": "vLLM", "sglang": "SGLang"}[kind]
        raise MissingExtraError(
            f"the {name} engine needs the extra {kind!r}, which is not installed: pip install 'rft-engines[{kind}]'"
        )


def _hf_engine(config: EngineConfig, seed: int, model: Any, tokenizer: Any) -> RolloutEngine:
    import torch

    from rft_engines.hf import HFEngine

    if config.tp_size > 1:
        raise UnsupportedCombinationError(
            f"engine 'hf' and tp_size={config.tp_size}: the embedded engine is whole on each rank, give tp_size=1"
        )
    if (model is None) == (not config.model_path):
        raise ValueError("engine 'hf' takes either a module (model=...) or EngineConfig.model_path: give exactly one")
    arguments: dict[str, Any] = {
        "tokenizer": tokenizer,
        "device": config.device,
        "dtype": None if config.dtype == "auto" else getattr(torch, config.dtype),
        "max_model_len": config.max_model_len,
        "seed": seed,
        "weights_loaded": config.load_weights,
    }
    if config.kv_cache_bytes is not None:
        arguments["kv_cache_bytes"] = config.kv_cache_bytes
    if config.max_rows is not None:
        arguments["max_rows"] = config.max_rows
    return HFEngine(model if model is not None else config.model_path, **(arguments | dict(config.options)))
