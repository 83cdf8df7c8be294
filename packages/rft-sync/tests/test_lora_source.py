"""LoRA merged out of place, and adapters alone: equal to the trainer's own forward."""

import json

import pytest
import torch
from torch import nn

from rft_sync import (
    AdapterSource,
    BroadcastManager,
    MergedLoRASource,
    ModuleSource,
    RecordingReceiver,
    UnsupportedCombination,
    source_for,
)
from rft_sync.sources.lora import merged_weight

peft = pytest.importorskip("peft")


class Net(nn.Module):
    def __init__(self, width=8, vocabulary=11):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, 4)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.lm_head(torch.tanh(self.q_proj(hidden)) + self.k_proj(hidden).sum(-1, keepdim=True))


def _randomise(model, std=0.3):
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=std)
    return model


def _peft(base=None, **options):
    torch.manual_seed(1)
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj"], **options}
    return _randomise(peft.get_peft_model(base or Net(), peft.LoraConfig(**settings)))


def _send(model, **options):
    receiver = RecordingReceiver()
    BroadcastManager(MergedLoRASource(model, **options), receiver).broadcast_to_engine()
    return receiver.tensors


def _assert_same_function(model, tensors):
    """A plain net with the sent weights computes what the PEFT model computes."""
    plain = Net()
    assert set(tensors) == set(plain.state_dict())
    plain.load_state_dict(tensors)
    ids = torch.arange(11)
    torch.testing.assert_close(plain(ids), model.eval()(ids), rtol=1e-5, atol=1e-5)


def test_merge_by_hand():
    merged = merged_weight(torch.eye(2), [(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]]), 2.0)])
    assert merged.tolist() == [[7.0, 12.0], [8.0, 17.0]]


def test_case_27_through_a_model_and_fifty_updates_leave_the_base_alone():
    base = nn.Sequential()
    base.add_module("q_proj", nn.Linear(2, 2, bias=False))
    model = peft.get_peft_model(base, peft.LoraConfig(r=1, lora_alpha=2, target_modules=["q_proj"]))
    layer = model.base_model.model.q_proj
    with torch.no_grad():
        layer.base_layer.weight.copy_(torch.eye(2))
        layer.lora_A["default"].weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.lora_B["default"].weight.copy_(torch.tensor([[3.0], [4.0]]))
    receiver = RecordingReceiver()
    manager = BroadcastManager.connect(model, receiver)
    for _ in range(50):
        manager.broadcast_to_engine()
        assert receiver.tensors["q_proj.weight"].tolist() == [[7.0, 12.0], [8.0, 17.0]]
    assert torch.equal(layer.base_layer.weight, torch.eye(2))


def test_bf16_base_is_bit_equal_after_100_updates_and_rounded_once():
    model = _peft(Net().bfloat16())
    layer = model.base_model.model.q_proj
    before = layer.base_layer.weight.clone()
    receiver = RecordingReceiver()
    manager = BroadcastManager.connect(model, receiver)
    for _ in range(100):
        manager.broadcast_to_engine()
    assert torch.equal(layer.base_layer.weight.view(torch.int16), before.view(torch.int16))
    first, second = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    once = (before.float() + layer.scaling["default"] * (second @ first)).bfloat16()
    assert torch.equal(receiver.tensors["q_proj.weight"], once)


def test_values_are_read_inside_the_update():
    model = _peft()
    layer = model.base_model.model.q_proj
    receiver = RecordingReceiver()
    manager = BroadcastManager.connect(model, receiver)
    with torch.no_grad():
        layer.base_layer.weight.fill_(1.0)
        layer.lora_A["default"].weight.fill_(0.25)
        for delta in (0.5, 0.7):
            layer.lora_B["default"].weight.fill_(delta / (2 * 2 * 0.25))  # scaling 2, rank 2
            manager.broadcast_to_engine()
            torch.testing.assert_close(receiver.tensors["q_proj.weight"], torch.full((8, 8), 1.0 + delta))
            assert torch.equal(layer.base_layer.weight, torch.ones(8, 8))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"k_proj": 4}, "alpha_pattern": {"k_proj": 3}},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["embed", "q_proj", "lm_head"]},
        {"lora_bias": True},
        {"use_dora": True},
        {"use_dora": True, "use_rslora": True},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_merged_equals_the_peft_forward(options):
    model = _peft(**options)
    if "modules_to_save" in options:
        with torch.no_grad():
            model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2.0)
    tensors = _send(model)
    assert not [name for name in tensors if "lora" in name or "base_layer" in name or "original_module" in name]
    _assert_same_function(model, tensors)


def test_conv1d_layout_and_convolutions():
    conv = nn.Sequential()
    conv.add_module("conv", nn.Conv2d(3, 4, 2))
    model = _peft(conv, target_modules=["conv"])
    tensors = _send(model)
    image = torch.randn(1, 3, 5, 5)
    plain = nn.Conv2d(3, 4, 2)
    plain.load_state_dict({"weight": tensors["conv.weight"], "bias": tensors["conv.bias"]})
    torch.testing.assert_close(plain(image), model.eval()(image), rtol=1e-5, atol=1e-5)

    transformers = pytest.importorskip("transformers")
    tall = nn.Sequential()
    tall.add_module("c_attn", transformers.pytorch_utils.Conv1D(6, 3))
    model = _peft(tall, target_modules=["c_attn"], fan_in_fan_out=True)
    tensors = _send(model)
    row = torch.randn(2, 3)
    expected = row @ tensors["c_attn.weight"] + tensors["c_attn.bias"]
    torch.testing.assert_close(expected, model.eval()(row), rtol=1e-5, atol=1e-5)


def test_several_active_adapters_add_up():
    model = _peft()
    model.add_adapter("second", peft.LoraConfig(r=3, lora_alpha=3, target_modules=["q_proj"]))
    _randomise(model)
    model.base_model.set_adapter(["default", "second"])
    _assert_same_function(model, _send(model))
    model.set_adapter("second")
    _assert_same_function(model, _send(model))


def test_an_adapter_that_is_merged_already_is_not_added_again():
    model = _peft()
    before = _send(model)
    model.merge_adapter()
    after = _send(model)
    torch.testing.assert_close(after["q_proj.weight"], before["q_proj.weight"])


def test_refusals_name_both_halves():
    with pytest.raises(UnsupportedCombination, match=r"IA3|ia3"):
        source_for(peft.get_peft_model(Net(), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])))
    model = _peft()
    with model.disable_adapter(), pytest.raises(UnsupportedCombination, match="disable_adapter"):
        source_for(model).metadata()
    with pytest.raises(UnsupportedCombination, match="full-weight source"):
        ModuleSource(model).metadata()
    with pytest.raises(UnsupportedCombination, match="modules_to_save"):
        AdapterSource(_peft(modules_to_save=["lm_head"]))
    with pytest.raises(UnsupportedCombination, match="DoRA"):
        AdapterSource(_peft(use_dora=True))
    with pytest.raises(UnsupportedCombination, match="trainable tokens"):
        source_for(_peft(trainable_token_indices={"embed": [1, 2]}))


def test_adapter_source_sends_what_peft_saves(tmp_path):
    model = _peft()
    receiver = RecordingReceiver()
    source = AdapterSource(model)
    BroadcastManager(source, receiver).broadcast_to_engine()
    saved = peft.get_peft_model_state_dict(model)
    assert set(receiver.tensors) == set(saved)
    for name, value in saved.items():
        assert torch.equal(receiver.tensors[name], value)
    assert json.loads(source.adapter_config())["r"] == 2


def test_source_for_picks_the_merging_source_under_ddp_free_wrappers():
    assert isinstance(source_for(_peft()), MergedLoRASource)
    assert isinstance(source_for(nn.Sequential(_peft())), MergedLoRASource)


def test_tied_embedding_with_an_adapter_on_one_side_is_sent_as_two_tensors():
    base = Net()
    base.lm_head.weight = base.embed.weight
    model = _peft(base, target_modules=["lm_head"])
    receiver = RecordingReceiver()
    BroadcastManager.connect(model, receiver).broadcast_to_engine()
    assert not torch.equal(receiver.tensors["lm_head.weight"], receiver.tensors["embed.weight"])
    assert torch.equal(receiver.tensors["embed.weight"], base.embed.weight)
