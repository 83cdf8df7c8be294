"""Adapter-only updates: the engine keeps its base weights, applies the adapter, and gets lost ones again."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rft_sync import (
    AdapterBroadcastManager,
    AdapterSource,
    BaseWeightsSource,
    BroadcastConfig,
    BroadcastManager,
    EngineNotReady,
    ManifestMismatch,
    ModuleReceiver,
    NonFiniteWeight,
    RecordingReceiver,
    ShapeMismatch,
    UnknownTensor,
    UnsupportedCombination,
    VerificationFailed,
)
from rft_sync.testing import spawn_ranks

peft = pytest.importorskip("peft")
FACTORS = 4


class Net(nn.Module):
    def __init__(self, width=8, vocabulary=11):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, 4)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.lm_head(torch.tanh(self.q_proj(hidden)) + self.k_proj(hidden).sum(-1, keepdim=True))


class Engine:
    """An engine object with an update session; `uses` lists the adapters it was told to generate with."""

    def __init__(self, native, state="ready"):
        self.native = native
        self.state = state
        self.weights_defined = state != "weights_undefined"
        self.weights_version = 0
        self.events = []

    def wake_up(self, tags):
        self.state = "weights_awake"
        self.events.append("wake")

    def begin_weight_update(self):
        assert self.state != "updating"
        self.state = "updating"
        self.events.append("begin")

    def use_adapter(self, adapter):
        self.events.append(f"use {adapter}")

    def finish_weight_update(self, version):
        assert self.state == "updating"
        self.state, self.weights_defined, self.weights_version = "ready", True, version
        self.events.append(f"finish {version}")

    def abort_weight_update(self, reason):
        self.state, self.weights_defined = "weights_undefined", False
        self.events.append("abort")


def trained(seed=1, **options):
    """A LoRA model with random factors."""
    torch.manual_seed(seed)
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj"], **options}
    model = peft.get_peft_model(Net(), peft.LoraConfig(**settings))
    return shuffle(model)


def shuffle(model):
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def same_function(model, engine):
    ids = torch.arange(11)
    with torch.no_grad():
        return torch.allclose(engine(ids), model(ids), rtol=1e-5, atol=1e-5)


def test_an_adapter_behind_a_layer_by_hand():
    base = nn.Sequential()
    base.add_module("q_proj", nn.Linear(2, 2, bias=False))
    model = peft.get_peft_model(base, peft.LoraConfig(r=1, lora_alpha=2, target_modules=["q_proj"]))
    layer = model.base_model.model.q_proj
    engine = nn.Sequential()
    engine.add_module("q_proj", nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        layer.base_layer.weight.copy_(torch.eye(2))
        layer.lora_A["default"].weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.lora_B["default"].weight.copy_(torch.tensor([[3.0], [4.0]]))
    report = AdapterBroadcastManager.connect(model, engine).broadcast_to_engine()
    # W + 2 B A = [[7, 12], [8, 17]], and [1, 1] through it.
    assert engine(torch.ones(1, 2)).tolist() == [[19.0, 25.0]]
    assert engine.q_proj.weight.tolist() == torch.eye(2).tolist()
    # Two factors of two numbers in fp32.
    assert (report.tensors_sent, report.nbytes, report.tensors_verified) == (2, 16, 2)


def test_the_base_goes_once_and_then_the_adapter_alone():
    model, engine = trained(), Net()
    manager = AdapterBroadcastManager.connect(model, engine)
    factors = sum(p.numel() * 4 for name, p in model.named_parameters() if "lora_" in name)
    for update in range(1, 4):
        report = manager.broadcast_to_engine()
        assert (report.version, manager.version, report.nbytes) == (update, update, factors)
        assert report.tensors_sent == report.tensors_loaded == report.tensors_expected == FACTORS
        assert report.tensors_verified == FACTORS
        assert len(report.fingerprint) == 64
        assert same_function(model, engine)
        # What the engine holds is the base, bit by bit, and stays so.
        base = model.base_model.model
        assert torch.equal(engine.q_proj.weight, base.q_proj.base_layer.weight)
        assert torch.equal(engine.embed.weight, base.embed.weight)
        assert engine.lm_head.weight is engine.embed.weight
        shuffle(model)
        assert not same_function(model, engine)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"r": 3, "lora_alpha": 5}], ids=str)
def test_adapter_and_merged_updates_are_one_function(options):
    model, engine = trained(**options), Net()
    AdapterBroadcastManager.connect(model, engine).broadcast_to_engine()
    assert same_function(model, engine)
    merged = Net()
    BroadcastManager.connect(model, merged).broadcast_to_engine()
    ids = torch.arange(11)
    assert torch.allclose(engine(ids), merged(ids), rtol=1e-5, atol=1e-5)


def test_full_weights_end_the_life_of_an_adapter():
    model, engine = trained(), Net()
    receiver = ModuleReceiver(engine)
    AdapterBroadcastManager(model, receiver).broadcast_to_engine()
    plain = Net()
    BroadcastManager.connect(plain, receiver).broadcast_to_engine()
    assert same_function(plain, engine)
    assert not engine.q_proj._forward_hooks
    AdapterBroadcastManager(model, receiver).broadcast_to_engine()
    receiver.close()
    assert not engine.q_proj._forward_hooks


def test_the_engine_never_generates_with_half_of_an_update():
    model, engine = trained(), Engine(Net())
    manager = AdapterBroadcastManager.connect(model, engine)
    manager.broadcast_to_engine()
    manager.broadcast_to_engine()
    assert engine.events == ["begin", "use None", "finish 1", "begin", "use None", "finish 2"]
    layer = model.base_model.model.q_proj.lora_A["default"]
    with torch.no_grad():
        layer.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteWeight, match="lora_A"):
        manager.broadcast_to_engine()
    assert (engine.state, manager.version, engine.weights_version) == ("weights_undefined", 2, 2)
    # The base goes again, and what fails behind it leaves nothing that could be taken for an update.
    with pytest.raises(NonFiniteWeight, match="lora_A"):
        manager.broadcast_to_engine()
    assert (engine.state, manager.version, engine.weights_version) == ("weights_undefined", 2, 2)
    shuffle(model)
    assert manager.broadcast_to_engine().version == 3
    assert same_function(model, engine.native)
    assert engine.events[6:] == ["begin", "abort", "begin", "abort", "begin", "use None", "finish 3"]


def test_an_engine_that_dropped_its_weights_in_sleep_gets_them_again():
    model, engine = trained(), Engine(Net())
    config = BroadcastConfig(on_asleep="wake")
    manager = AdapterBroadcastManager.connect(model, engine, config)
    manager.broadcast_to_engine()
    engine.state, engine.weights_defined = "asleep", False
    with torch.no_grad():
        engine.native.q_proj.weight.fill_(7.0)
    alone = BroadcastManager(AdapterSource(model), manager.receiver, config, engine=engine)
    with pytest.raises(EngineNotReady, match="base weights are undefined"):
        alone.broadcast_to_engine()
    assert manager.broadcast_to_engine().version == 2
    assert same_function(model, engine.native)
    # A sleep that kept them costs no second sending.
    engine.state = "asleep"
    before = [call for call in engine.events if call == "wake"]
    report = manager.broadcast_to_engine()
    assert report.tensors_sent == FACTORS
    assert len([call for call in engine.events if call == "wake"]) == len(before) + 1


def test_the_engine_is_told_what_to_generate_with():
    class WithAdapters(RecordingReceiver):
        adapter = "policy"

    engine = Engine(WithAdapters())
    manager = AdapterBroadcastManager.connect(trained(), engine)
    manager.broadcast_to_engine()
    kinds = [call for call, _ in engine.native.calls]
    assert kinds == ["start", "load", "finish", "start", "load", "finish"]
    assert engine.events == ["begin", "use policy", "finish 1"]


def test_a_factor_that_differs_in_the_engine_is_named():
    class Lossy(ModuleReceiver):
        def finish(self, version):
            super().finish(version)
            if self._adapter.factors:
                next(iter(self._adapter.factors.values())).add_(1)

    with pytest.raises(VerificationFailed, match="lora_A"):
        AdapterBroadcastManager(trained(), Lossy(Net())).broadcast_to_engine()


def test_the_base_is_what_it_was_before_the_adapters():
    torch.manual_seed(3)
    plain = Net()
    model = shuffle(
        peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    )
    source = BaseWeightsSource(model)
    names = [meta.name for meta in source.metadata()]
    assert sorted(names) == sorted(plain.state_dict())
    with source.gather(names) as tensors:
        assert all(torch.equal(tensors[name], value) for name, value in plain.state_dict().items())
    model.merge_adapter()
    with pytest.raises(UnsupportedCombination, match="merged in place"):
        source.metadata()


def test_what_a_module_cannot_apply_is_refused_by_name():
    def send(model, engine=None, **options):
        AdapterBroadcastManager(model, ModuleReceiver(engine or Net(), **options)).broadcast_to_engine()

    with pytest.raises(UnsupportedCombination, match="alpha_pattern"):
        send(trained(alpha_pattern={"q_proj": 8}))
    with pytest.raises(UnknownTensor, match="embed"):
        send(trained(target_modules=["embed"]))
    with pytest.raises(UnsupportedCombination, match="share_weights"):
        AdapterBroadcastManager(trained(), ModuleReceiver(Net()), BroadcastConfig(share_weights=True))
    source, receiver = AdapterSource(trained()), ModuleReceiver(Net(), rename=lambda name: name + "x")
    with pytest.raises(UnsupportedCombination, match="rename"):
        BroadcastManager(source, receiver).broadcast_to_engine()
    wider = Net()
    wider.q_proj = nn.Linear(9, 8)
    with pytest.raises(ShapeMismatch, match=r"\(2, 8\).*\(2, 9\)"):
        BroadcastManager(source, ModuleReceiver(wider)).broadcast_to_engine()
    fewer = Net()
    del fewer.q_proj
    with pytest.raises(UnknownTensor, match="no layer"):
        BroadcastManager(source, ModuleReceiver(fewer)).broadcast_to_engine()
    fewer.q_proj = nn.Identity()
    with pytest.raises(UnsupportedCombination, match="Identity"):
        BroadcastManager(source, ModuleReceiver(fewer)).broadcast_to_engine()


def lost_on_one_rank(rank):
    """One rank's engine loses its base; every rank sends it again. Returns the kinds of updates each rank saw."""
    model, receiver = trained(), RecordingReceiver()
    engine = Engine(receiver)
    manager = AdapterBroadcastManager.connect(model, engine)
    manager.broadcast_to_engine()
    manager.broadcast_to_engine()
    engine.weights_defined = rank != 1
    manager.broadcast_to_engine()
    loads = [len(names) for call, names in receiver.calls if call == "load"]
    # A rank that stays away is named before any collective.
    impatient = AdapterBroadcastManager.connect(model, receiver, BroadcastConfig(attendance_seconds=0.5))
    if rank == 0:
        with pytest.raises(ManifestMismatch, match=r"ranks \[1\] of 2 did not call"):
            impatient.broadcast_to_engine()
    dist.barrier()
    return loads


def test_one_engine_without_a_base_makes_all_ranks_send_it():
    base = 6  # embedding and head under both names, two weights and two biases
    for loads in spawn_ranks(lost_on_one_rank, 2):
        assert loads == [base, FACTORS, FACTORS, base, FACTORS]
