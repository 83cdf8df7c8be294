"""The recorded copies of a vLLM-style loader: fused qkv, gate_up, tensor-parallel slices, padded vocabulary, a tie."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from rft_sync import (
    BroadcastConfig,
    BroadcastManager,
    EngineNotReady,
    EngineRefused,
    IncompleteGroup,
    ModuleSource,
    ShapeMismatch,
    UnknownTensor,
    VerificationFailed,
    build_manifest,
    verify,
)
from rft_sync.receivers.copy_plan import CopyRecorder
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (1, 2)])
def test_replayed_copies_equal_the_loader_for_every_slice(rank, world, tied):
    trainer, llm = Trainer(1, tied), FakeLLM(EngineModel(rank, world, tied))
    manager = _manager(trainer, llm, verify="all")
    identities = {name: (id(p), p.data_ptr()) for name, p in llm.model.named_parameters()}
    assert manager.broadcast_to_engine().tensors_verified > 0
    assert manager.receiver.plan_refusal == ""
    llm.model.load_weights = None  # from here on nothing but the plan may write
    for _ in range(2):
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.mul_(1.5)
            for parameter in llm.model.parameters():
                parameter.fill_(-1.0)  # memory that slept
        report = manager.broadcast_to_engine()
        for name, value in _expected(trainer, rank, world, tied).items():
            assert torch.equal(llm.model.state_dict()[name], value), name
        assert report.tensors_verified == report.tensors_sent - tied
    assert identities == {name: (id(p), p.data_ptr()) for name, p in llm.model.named_parameters()}


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ("computed", "written from a tensor that was not sent"),
        ("gap", "written 0 to 1 times"),
        ("twice", "written 1 to 2 times"),
        ("host", "host|single element"),
    ],
)
def test_a_loader_that_cannot_be_followed_is_kept(loader, reason):
    trainer, llm = Trainer(1), FakeLLM(EngineModel(loader=loader))
    manager = _manager(trainer, llm)
    manager.broadcast_to_engine()
    assert re.search(reason, manager.receiver.plan_refusal)
    with torch.no_grad():
        trainer.model.norm.weight.add_(1.0)
    report = manager.broadcast_to_engine()
    assert report.tensors_verified == 0  # what cannot be followed cannot be read back, and the report says so
    other = EngineModel(loader=loader)
    other.load_weights(trainer.state_dict().items())
    assert torch.equal(llm.model.norm.weight[1:], other.norm.weight[1:])
    assert torch.equal(llm.model.qkv_proj.weight, other.qkv_proj.weight)


def test_verification_reads_the_live_slices():
    trainer, llm = Trainer(1), FakeLLM(EngineModel(1, 2))
    manager = _manager(trainer, llm)
    manager.broadcast_to_engine()
    with torch.no_grad():
        llm.model.qkv_proj.weight[[4, 5]] = llm.model.qkv_proj.weight[[5, 4]].clone()  # rows of k
    with pytest.raises(VerificationFailed) as caught:
        verify(manager.source, manager.receiver)
    assert caught.value.names == ("model.k_proj.weight",)


def test_caches_are_reset_after_every_update_and_random_state_is_kept():
    llm = FakeLLM(EngineModel())
    manager = _manager(Trainer(1), llm)
    for version in ("1", "2"):
        llm.resets.clear()
        manager.broadcast_to_engine()
        assert llm.resets == ["prefix", "multimodal", "encoder", "lora", version]
    before = torch.get_rng_state()
    manager.receiver.start(build_manifest(manager.source.metadata(), bucket_bytes=300))
    manager.receiver.cancel()
    assert torch.equal(before, torch.get_rng_state())
    llm.refuse = True
    with pytest.raises(EngineRefused, match="prefix cache"):
        manager.broadcast_to_engine()
    assert not manager.receiver.session.usable


def test_engine_states_and_sizes_are_refused_before_anything_is_written():
    llm = FakeLLM(EngineModel())
    manager = _manager(Trainer(1), llm)
    llm.unfinished = True
    with pytest.raises(EngineNotReady, match="unfinished"):
        manager.broadcast_to_engine()
    llm.unfinished = False
    llm.tags.update({"weights", "kv_cache"})
    with pytest.raises(EngineNotReady, match="asleep"):
        manager.broadcast_to_engine()
    waking = BroadcastManager(manager.source, manager.receiver, BroadcastConfig(on_asleep="wake"))
    waking.broadcast_to_engine()
    assert llm.tags == {"kv_cache"}  # the cache comes back after the update, not before
    llm.llm_engine.vllm_config.model_config.get_vocab_size = lambda: 99
    with pytest.raises(ShapeMismatch, match="10 rows and the engine's vocabulary 99"):
        manager.broadcast_to_engine()
    llm.llm_engine = None
    with pytest.raises(EngineNotReady, match="gone"):
        manager.broadcast_to_engine()


def test_incomplete_updates_are_named():
    llm = FakeLLM(EngineModel())
    trainer = Trainer(1)
    trainer.model.norm = nn.Identity()
    with pytest.raises(UnknownTensor, match=r"norm\.weight"):
        _manager(trainer, llm).broadcast_to_engine()
    receiver = VLLMReceiver(llm, live_layout=True)
    source = ModuleSource(Trainer(1))
    manifest = build_manifest(source.metadata(), bucket_bytes=1 << 20)
    receiver.start(manifest)
    from rft_sync import plan_buckets

    qkv = [m for m in manifest.metadata if "q_proj" in m.name]
    with source.gather([m.name for m in qkv]) as tensors, pytest.raises(IncompleteGroup, match="k_proj"):
        receiver.load(plan_buckets(qkv, 1 << 20)[0].filled(tensors))


def test_a_failed_update_goes_back_to_the_loader():
    llm = FakeLLM(EngineModel())
    trainer = Trainer(1)
    manager = _manager(trainer, llm)
    manager.broadcast_to_engine()
    llm.refuse = True
    with pytest.raises(EngineRefused):
        manager.broadcast_to_engine()
    assert not manager.receiver.session.usable
    llm.refuse = False
    loads = []
    load = llm.model.load_weights
    llm.model.load_weights = lambda pairs: loads.append(1) or load(pairs)
    with torch.no_grad():
        trainer.lm_head.weight[0, 0] = 1.0
    manager.broadcast_to_engine()
    assert loads
    assert manager.receiver.session.usable
    for name, value in _expected(trainer, 0, 1).items():
        assert torch.equal(llm.model.state_dict()[name], value)


def test_full_weights_end_the_life_of_an_adapter():
    llm = FakeLLM(EngineModel(), lora=True)
    manager = _manager(Trainer(1), llm)
    removed = []
    llm.llm_engine.remove_lora = removed.append
    manager.broadcast_to_engine()
    assert removed == []
    manager.receiver._adapter.request = object()
    manager.broadcast_to_engine()
    assert (removed, manager.receiver.lora_request) == ([1], None)


def test_layers_whose_kernels_read_something_else_are_not_written_live():
    from rft_sync.receivers.vllm_model import _is_derived

    class RoutedExperts(nn.Module):
        pass

    class UnquantizedFusedMoEMethod:
        pass

    stacked, by_method, absorbed = nn.Module(), nn.Module(), nn.Module()
    stacked.w13_weight = nn.Parameter(torch.zeros(1))
    by_method.quant_method = UnquantizedFusedMoEMethod()
    absorbed.W_UV = torch.zeros(1)
    assert all(_is_derived(module) for module in (RoutedExperts(), stacked, by_method, absorbed))
    assert not any(_is_derived(module) for module in EngineModel().modules())


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([], (0, 0)),
        ([((12,), (1,), 0)], (1, 1)),
        ([((2, 3), (3, 1), 0), ((6,), (1,), 6)], (1, 1)),
        ([((2, 3), (3, 1), 0), ((6,), (1,), 5)], (0, 2)),
        ([((12,), (1,), 0), ((1, 4), (99, 1), 2), ((4,), (1,), 2)], (1, 3)),
        ([((4, 2), (3, 1), 0), ((4, 1), (3, 1), 2)], (1, 1)),  # columns
        ([((4, 2), (3, 1), 0), ((4, 2), (3, 1), 1)], (1, 2)),
        ([((3,), (0,), 0)], (0, 2)),  # one element over and over: more than once
    ],
)
def test_how_often_each_element_is_written(pieces, expected):
    from rft_sync.receivers.copy_plan import Region, _times_written

    assert _times_written(12, [Region("w", *piece) for piece in pieces]) == expected


def test_an_empty_live_parameter_refuses_the_plan():
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(torch.zeros(0))
    recorder = CopyRecorder(model)
    assert recorder.plan() is None
    assert "live layout" in recorder.refusal
