"""Updates that copy straight from the trainer's live tensors: checks, casts, moves, faults."""

import importlib.util
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from rft_sync import BroadcastConfig, BroadcastManager, ModuleSource, NonFiniteWeight, UnknownTensor, VerificationFailed
from rft_sync.receivers.vllm import VLLMReceiver


def _kit():
    """`fused_engine.py` beside this file."""
    spec = importlib.util.spec_from_file_location("fused_engine", Path(__file__).with_name("fused_engine.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kit = _kit()
Trainer, EngineModel, FakeLLM, _manager, _expected = (
    kit.Trainer,
    kit.EngineModel,
    kit.FakeLLM,
    kit.connect,
    kit.expected_state,
)


def test_live_tensors_are_checked_before_anything_is_written():
    trainer, llm = Trainer(1), FakeLLM(EngineModel())
    manager = _manager(trainer, llm)
    manager.broadcast_to_engine()
    before = {name: value.clone() for name, value in llm.model.state_dict().items()}
    with torch.no_grad():
        trainer.model.embed_tokens.weight.add_(1.0)
        trainer.lm_head.weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteWeight, match=r"lm_head\.weight"):
        manager.broadcast_to_engine()
    assert all(torch.equal(before[name], value) for name, value in llm.model.state_dict().items())
    assert manager.receiver.session.usable  # the engine still has the last version, whole
    assert manager.receiver.session.version == manager.version == 1


@pytest.mark.parametrize("verify_mode", ["all", "rotating", "off"])
def test_masters_are_cast_on_the_way_without_a_copy(verify_mode):
    trainer, engine = Trainer(1), EngineModel().bfloat16()
    llm = FakeLLM(engine)
    llm.llm_engine.vllm_config.model_config.dtype = torch.bfloat16
    source = ModuleSource(trainer, dtype=torch.bfloat16)
    receiver = VLLMReceiver(llm, live_layout=True)
    manager = BroadcastManager(source, receiver, BroadcastConfig(verify=verify_mode))
    manager.broadcast_to_engine()
    gathers = []
    gather = source.gather
    source.gather = lambda names: gathers.append(names) or gather(names)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    report = manager.broadcast_to_engine()
    assert gathers == []
    assert report.tensors_sent == report.tensors_loaded
    expected = EngineModel().bfloat16()
    expected.load_weights((name, value.bfloat16()) for name, value in trainer.state_dict().items())
    for name, value in expected.state_dict().items():
        assert torch.equal(engine.state_dict()[name], value), name


def test_tensors_that_moved_are_found_on_both_sides():
    trainer, llm = Trainer(1), FakeLLM(EngineModel())
    manager = _manager(trainer, llm, verify="all")
    manager.broadcast_to_engine()
    manager.broadcast_to_engine()
    with torch.no_grad():
        trainer.model.norm.weight = nn.Parameter(torch.randn(kit.WIDTH))  # another tensor under the name
        trainer.model.o_proj.weight.data = torch.randn(kit.WIDTH, kit.HEADS * kit.DIM)  # other memory
        llm.model.qkv_proj.weight = nn.Parameter(torch.zeros_like(llm.model.qkv_proj.weight), requires_grad=False)
        llm.model.norm.weight.data = torch.zeros(kit.WIDTH)
    manager.broadcast_to_engine()
    for name, value in _expected(trainer, 0, 1).items():
        assert torch.equal(llm.model.state_dict()[name], value), name
    llm.model.norm.extra = nn.Parameter(torch.zeros(2), requires_grad=False)  # another layout: recorded anew
    with pytest.raises(UnknownTensor, match=r"norm\.extra"):
        manager.broadcast_to_engine()


def test_a_planted_fault_is_found_when_live_tensors_are_copied():
    trainer, llm = Trainer(1), FakeLLM(EngineModel(1, 2))
    manager = _manager(trainer, llm, verify="all")
    manager.broadcast_to_engine()
    load_live = manager.receiver.load_live

    def faulty(tensors):
        load_live(tensors)
        llm.model.gate_up_proj.weight.data[0, 0] += 1.0  # gate_proj's row of this rank

    manager.receiver.load_live = faulty
    with pytest.raises(VerificationFailed) as caught:
        manager.broadcast_to_engine()
    assert caught.value.names == ("model.gate_proj.weight",)
    assert (manager.version, manager.receiver.session.usable) == (1, False)


FAULTS = {
    "one flipped bit": lambda model: model.model.k_proj.weight.data.view(torch.int16)[3, 1].bitwise_xor_(1),
    "permuted rows": lambda model: model.model.k_proj.weight.data.copy_(model.model.k_proj.weight.data.flip(0)),
    "stale": lambda model: model.model.k_proj.weight.data.copy_(model.before),
    "swapped": lambda model: model.model.k_proj.weight.data.copy_(model.model.v_proj.weight.data),
}


@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_remembered_between_updates_hides_no_fault(fault, dtype):
    trainer, engine = Trainer(1), Trainer(2).to(dtype)
    manager = BroadcastManager.connect(trainer, engine, BroadcastConfig(verify="all"))
    tokens, layouts = set(), []
    layout = manager._scanner._layout
    manager._scanner._layout = lambda pieces: layouts.append(len(pieces)) or layout(pieces)
    for _ in range(4):  # from the second on nothing is planned, found or laid out anew
        with torch.no_grad():
            trainer.model.k_proj.weight.add_(0.5)
        manager.broadcast_to_engine()
        tokens.add(id(manager.source.live().token))
    assert len(tokens) == 1
    assert layouts == [12] * 9  # the look for NaN once; the fingerprints of what is sent and what is read back
    assert manager.receiver._repeats(manager.source.live()) is False  # an update has to be open
    engine.before = engine.model.k_proj.weight.detach().clone()
    with torch.no_grad():
        trainer.model.k_proj.weight.add_(0.25)
    load_live = manager.receiver.load_live

    def faulty(tensors):
        assert manager.receiver._repeats(tensors)
        load_live(tensors)
        FAULTS[fault](engine)

    manager.receiver.load_live = faulty
    with pytest.raises(VerificationFailed) as caught:
        manager.broadcast_to_engine()
    assert caught.value.names == ("model.k_proj.weight",)
    manager.receiver.load_live = load_live
    with torch.no_grad():
        trainer.model.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteWeight, match=r"v_proj\.weight"):
        manager.broadcast_to_engine()


def test_modules_that_are_renamed_or_shared_are_other_models():
    trainer = Trainer(1)
    source = ModuleSource(trainer)
    names = [meta.name for meta in source.metadata()]
    assert "model.norm.weight" in names
    trainer.model.last = trainer.model._modules.pop("norm")
    renamed = [meta.name for meta in source.metadata()]
    assert "model.last.weight" in renamed
    assert "model.norm.weight" not in renamed
    token = source.live().token
    trainer.head_again = trainer.lm_head  # one module under two names
    shared = {meta.name: meta.alias_of for meta in source.metadata()}
    assert shared["head_again.weight"] == "lm_head.weight"
    assert source.live().token is not token


def test_what_is_remembered_does_not_keep_the_trainers_memory():
    trainer, engine = Trainer(1), Trainer(2)
    manager = BroadcastManager.connect(trainer, engine)
    for _ in range(3):
        manager.broadcast_to_engine()
    old = weakref.ref(trainer.lm_head.weight.data.untyped_storage())
    trainer.lm_head.weight.data = trainer.lm_head.weight.data.clone()
    manager.broadcast_to_engine()
    assert old() is None
    assert torch.equal(engine.lm_head.weight, trainer.lm_head.weight)
