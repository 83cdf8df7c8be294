"""What vLLM is built with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rft_engines.config import EngineConfig
from rft_engines.errors import UnsupportedCombinationError

# vLLM (0.24 to 0.32) takes any temperature between 0 and this for this one.
LOWEST_TEMPERATURE = 0.01
# vLLM wants a number above 0.
_NO_SHARE = 0.01
# What vLLM accepts for max_lora_rank.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def engine_arguments(config: EngineConfig, *, seed: int, launched: bool, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`.

    Args:
        config: the engine's config; its options win.
        seed: of this rank's engine, equal in a TP group.
        launched: whether ranks of a launcher (torchrun) build the engine together.
        on_cpu: vLLM has no sleep mode there, and its kernels are not captured.

    Raises:
        UnsupportedCombinationError: adapters of a rank that vLLM does not know.
    """
    arguments: dict[str, Any] = {
        "model": config.model_path,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tp_size,
        "seed": seed,
        "gpu_memory_utilization": config.memory_utilization,
        # Neutral sampling: nothing is filled in from the checkpoint.
        "generation_config": "vllm",
        # After temperature, top-k and top-p: what the importance ratio needs. Equal to raw at temperature 1 without
        # truncation.
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if launched:
        arguments["distributed_executor_backend"] = "external_launcher"
    if config.max_model_len is not None:
        arguments["max_model_len"] = config.max_model_len
    if config.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = config.kv_cache_bytes
        # The share decides nothing then, yet vLLM refuses to start when so much is not free beside the trainer.
        arguments["gpu_memory_utilization"] = _NO_SHARE
    if config.max_rows is not None:
        arguments["max_num_seqs"] = config.max_rows
    if config.lora_rank:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _lora_rank(config.lora_rank)}
    if not config.load_weights:
        arguments["load_format"] = "dummy"
    if not any((Path(config.model_path) / name).is_file() for name in _TOKENIZER_FILES):
        arguments["skip_tokenizer_init"] = True
    if on_cpu:
        arguments["enforce_eager"] = True
    elif config.enable_sleep:
        arguments["enable_sleep_mode"] = True
    return arguments | dict(config.options)


def _lora_rank(wanted: int) -> int:
    """The smallest rank that vLLM can be built for and that holds `wanted`."""
    fitting = [rank for rank in _LORA_RANKS if rank >= wanted]
    if not fitting:
        raise UnsupportedCombinationError(
            f"engine 'vllm' and lora_rank={wanted}: it applies adapters up to rank {_LORA_RANKS[-1]}, give 0 and send "
            "merged weights"
        )
    return fitting[0]


def engine_environment(*, on_cpu: bool) -> Mapping[str, str]:
    """Environment variables vLLM reads while it is built."""
    # In this process: weights are written into it, and its states follow the trainer's.
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if on_cpu:
        # Several ranks share the cores; vLLM would bind each rank's threads to cores of its own choice.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return variables
