"""What vLLM is built with, without vLLM."""

import pytest

from rft_engines import EngineConfig, UnsupportedCombinationError
from rft_engines.vllm.arguments import engine_arguments, engine_environment


def arguments(on_cpu=False, launched=False, **fields):
    config = EngineConfig(**({"kind": "vllm", "model_path": "nowhere"} | fields))
    return engine_arguments(config, seed=3, launched=launched, on_cpu=on_cpu)


def test_nothing_is_filled_in_from_the_checkpoint_and_log_probs_are_of_what_is_sampled():
    given = arguments()
    assert given["generation_config"] == "vllm"
    assert given["logprobs_mode"] == "processed_logprobs"
    assert given["seed"] == 3
    assert given["skip_tokenizer_init"]


def test_a_kv_cache_of_stated_size_asks_for_no_share_of_the_device():
    assert arguments(memory_utilization=0.4)["gpu_memory_utilization"] == 0.4
    stated = arguments(memory_utilization=0.4, kv_cache_bytes=1 << 30)
    assert stated["kv_cache_memory_bytes"] == 1 << 30
    # vLLM does not start when this share is not free, and a trainer may hold more than the rest.
    assert stated["gpu_memory_utilization"] <= 0.01


def test_sleep_and_graphs_are_for_devices():
    assert arguments(enable_sleep=True)["enable_sleep_mode"]
    assert "enforce_eager" not in arguments()
    assert "enable_sleep_mode" not in arguments(on_cpu=True, enable_sleep=True)
    assert arguments(on_cpu=True)["enforce_eager"]


def test_ranks_of_a_launcher_build_together_in_their_own_processes():
    assert "distributed_executor_backend" not in arguments()
    assert arguments(launched=True)["distributed_executor_backend"] == "external_launcher"
    assert engine_environment(on_cpu=False) == {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def test_limits_and_options_reach_the_engine_and_options_win():
    given = arguments(max_model_len=64, max_rows=8, load_weights=False, options={"max_num_seqs": 4, "block_size": 32})
    assert (given["max_model_len"], given["load_format"]) == (64, "dummy")
    assert (given["max_num_seqs"], given["block_size"]) == (4, 32)


def test_adapters_are_built_for_when_a_rank_is_given():
    assert "enable_lora" not in arguments()
    given = arguments(lora_rank=9)
    # The smallest rank that vLLM knows and that holds 9.
    assert (given["enable_lora"], given["max_lora_rank"], given["max_loras"]) == (True, 16, 1)
    assert arguments(lora_rank=512)["max_lora_rank"] == 512
    with pytest.raises(UnsupportedCombinationError, match="lora_rank=513"):
        arguments(lora_rank=513)
