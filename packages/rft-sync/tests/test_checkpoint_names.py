"""Names and values are those of transformers' own checkpoints: dense, tied, stacked experts, vision models."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rft_sync import BroadcastConfig, BroadcastManager, ModuleReceiver, RecordingReceiver, fused_groups, source_for
from rft_sync.naming import fp32_patterns, matches_any

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _build(kind, seed=0):
    torch.manual_seed(seed)
    if kind in ("untied", "tied"):
        config = transformers.Qwen2Config(**SMALL, tie_word_embeddings=kind == "tied")
        return transformers.Qwen2ForCausalLM(config)
    if kind == "experts":
        config = transformers.Qwen3MoeConfig(
            **SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8
        )
        return transformers.Qwen3MoeForCausalLM(config)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(text_config=SMALL, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _saved(model, folder):
    """What transformers itself writes, read back without rft-sync."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return {name: value for file in Path(folder).glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("kind", ["untied", "tied", "experts", "vision"])
def test_what_is_sent_is_what_the_library_saves(kind, tmp_path):
    model = _build(kind)
    receiver = RecordingReceiver()
    BroadcastManager(source_for(model), receiver, BroadcastConfig(bucket_bytes=5000)).broadcast_to_engine()
    saved = _saved(model, tmp_path)
    aliases = {"lm_head.weight"} if kind == "tied" else set()
    assert set(receiver.tensors) == set(saved) | aliases
    for name, value in saved.items():
        assert torch.equal(receiver.tensors[name], value), name
    if aliases:
        assert torch.equal(receiver.tensors["lm_head.weight"], model.get_input_embeddings().weight)


@pytest.mark.parametrize("kind", ["tied", "experts", "vision"])
def test_a_module_of_the_same_kind_receives_them(kind):
    model, engine = _build(kind), _build(kind, seed=1)
    report = BroadcastManager.connect(model, engine, BroadcastConfig(bucket_bytes=5000)).broadcast_to_engine()
    assert report.tensors_verified == report.tensors_expected
    for name, value in model.state_dict().items():
        assert torch.equal(engine.state_dict()[name], value), name


def test_greedy_tokens_and_log_probs_agree_after_each_update():
    model, engine = _build("tied"), _build("tied", seed=1)
    manager = BroadcastManager.connect(model, engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    prompt = torch.tensor([[5, 9, 11, 3]])
    for _ in range(3):
        model(prompt, labels=prompt).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(model(prompt).logits, engine(prompt).logits)
        manager.broadcast_to_engine()
        options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        assert torch.equal(model.generate(prompt, **options), engine.generate(prompt, **options))
        gap = torch.log_softmax(model(prompt).logits, -1) - torch.log_softmax(engine(prompt).logits, -1)
        assert gap.abs().max() < 1e-5


def test_a_tied_model_trains_sends_saves_and_reloads_tied(tmp_path):
    model, engine = _build("tied"), _build("tied", seed=1)
    model(torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    report = BroadcastManager.connect(model, engine).broadcast_to_engine()
    assert report.aliases == 1
    assert report.nbytes == 4 * sum(parameter.numel() for parameter in model.parameters())
    assert engine.lm_head.weight is engine.model.embed_tokens.weight
    saved = _saved(model, tmp_path)
    assert ("lm_head.weight" in saved, "model.embed_tokens.weight" in saved) == (False, True)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reloaded.lm_head.weight is reloaded.model.embed_tokens.weight
    assert torch.equal(reloaded.lm_head.weight, engine.lm_head.weight)


def test_names_after_loading_from_a_folder_are_the_folders(tmp_path):
    saved = _saved(_build("experts"), tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {meta.name for meta in source_for(loaded).metadata()} == set(saved)


def test_experts_of_a_layer_travel_together():
    names = [meta.name for meta in source_for(_build("experts")).metadata()]
    experts = [group for group in fused_groups(names) if "experts" in group[0]]
    assert [len(group) for group in experts] == [12, 12]  # 4 experts x gate, up, down


def test_stacked_experts_are_written_through_strided_views():
    engine = _build("experts", seed=1)
    places = ModuleReceiver(engine)._places
    place = places["model.layers.1.mlp.experts.2.up_proj.weight"]
    with torch.no_grad():
        place.view().fill_(7.0)
    stacked = engine.model.layers[1].mlp.experts.gate_up_proj
    assert stacked[2, 16:].unique().tolist() == [7.0]
    assert 7.0 not in stacked[2, :16]
    assert 7.0 not in stacked[1]


def test_modules_that_the_library_keeps_in_fp32_are_not_cast():
    class Router(nn.Module):
        _keep_in_fp32_modules_strict = frozenset({"router"})

        def __init__(self):
            super().__init__()
            self.router, self.dense = nn.Linear(2, 2), nn.Linear(2, 2)

    metadata = {meta.name: meta.dtype for meta in source_for(Router(), dtype=torch.bfloat16).metadata()}
    assert metadata["router.weight"] == torch.float32
    assert metadata["dense.weight"] == torch.bfloat16
    named = source_for(Router(), dtype=torch.bfloat16, keep_fp32=["dense.b*"])
    assert {meta.name: meta.dtype for meta in named.metadata()}["dense.bias"] == torch.float32
    assert fp32_patterns(Router(), torch.float32) == ()
    assert matches_any("a.layers.3.norm.weight", ["layers.*.norm"])
    assert not matches_any("a.layernorm.weight", ["norm"])


def test_a_copy_of_the_model_is_another_model():
    model = _build("tied")
    source = source_for(model)
    source.metadata()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.add_(1.0)
    with source.gather(["lm_head.weight"]) as tensors:
        assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight)


def test_naming_needs_transformers_only_for_its_own_models():
    code = (
        "import sys, torch, rft_sync\n"
        "rft_sync.source_for(torch.nn.Linear(1, 1)).metadata()\n"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
