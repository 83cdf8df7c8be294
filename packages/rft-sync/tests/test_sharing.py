"""A trainer that trains in the engine's memory ends where one that copies does."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rft_sync import BroadcastConfig, BroadcastManager, ModuleSource, UnsupportedCombination, source_for, verify
from rft_sync.receivers.vllm import VLLMReceiver
from rft_sync.testing import spawn_ranks


def _loaders():
    """`fused_engine.py` beside this file."""
    spec = importlib.util.spec_from_file_location("fused_engine", Path(__file__).with_name("fused_engine.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _step(trainer, optimizer, seed):
    torch.manual_seed(seed)
    loss = sum(
        (parameter * torch.randn_like(parameter)).sum() + parameter.pow(2).sum() for parameter in trainer.parameters()
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _trained(trainer, receiver, share):
    """Engine after four updates with training between, and the reports."""
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.1)
    manager = BroadcastManager(source_for(trainer), receiver, BroadcastConfig(share_weights=share, verify="all"))
    reports = []
    for step in range(4):
        _step(trainer, optimizer, step)
        reports.append(manager.broadcast_to_engine())
    return manager, reports


@pytest.mark.parametrize("tied", [False, True])
def test_training_in_fused_memory_equals_copying(tied):
    kit = _loaders()
    engines = []
    for share in (False, True):
        trainer, llm = kit.Trainer(1, tied), kit.FakeLLM(kit.EngineModel(tied=tied))
        receiver = VLLMReceiver(llm, live_layout=True)
        manager, reports = _trained(trainer, receiver, share)
        assert [report.version for report in reports] == [1, 2, 3, 4]
        assert all(report.tensors_sent == report.tensors_loaded for report in reports)
        engines.append(llm.model)
        fused = llm.model.qkv_proj.weight
        inside = fused.data_ptr() <= trainer.model.k_proj.weight.data_ptr() < fused.data_ptr() + fused.nbytes
        assert inside == share
        verify(manager.source, receiver)
    for name, value in engines[0].state_dict().items():
        assert torch.equal(engines[1].state_dict()[name], value), name
    copies = receiver._copies.replay
    assert copies.nbytes == 2 * kit.WIDTH * 4 * (1 if tied else 2)  # the padding alone is written still


def test_training_in_a_modules_memory_equals_copying():
    results = []
    for share in (False, True):
        torch.manual_seed(0)
        trainer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        engine = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        manager, _ = _trained(trainer, BroadcastManager.connect(trainer, engine).receiver, share)
        assert (engine[0].weight.data_ptr() == trainer[0].weight.data_ptr()) == share
        trainer[1].running_mean += 1.0  # buffers are copied as before
        manager.broadcast_to_engine()
        assert torch.equal(engine[1].running_mean, trainer[1].running_mean)
        results.append([value.clone() for value in engine.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _sharded(rank):
    results = []
    for share in (False, True):
        torch.manual_seed(0)
        trainer = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        engine = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(trainer[0], mesh=mesh)
        fully_shard(trainer, mesh=mesh)
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.1)
        manager = BroadcastManager.connect(trainer, engine, BroadcastConfig(share_weights=share))
        for step in range(4):
            torch.manual_seed(step)
            trainer(torch.randn(5, 4)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.broadcast_to_engine()
            with torch.no_grad():
                probe = torch.ones(2, 4)
                torch.testing.assert_close(engine(probe), trainer(probe), rtol=0, atol=0)
            trainer.reshard()
        assert (engine[1].weight.data_ptr() == trainer[1].weight._local_tensor.data_ptr()) == share
        results.append([value.clone() for value in engine.state_dict().values()])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_fsdp2_on_one_rank_trains_in_the_engines_memory():
    assert spawn_ranks(_sharded, 1) == [True]


def test_what_cannot_share_is_refused_with_every_reason_before_anything_is_sent():
    kit = _loaders()
    config = BroadcastConfig(share_weights=True)
    llm = kit.FakeLLM(kit.EngineModel(), lora=True)
    llm.llm_engine.vllm_config.model_config.enable_sleep_mode = True
    source = ModuleSource(kit.Trainer(1), dtype=torch.bfloat16)
    with pytest.raises(UnsupportedCombination, match=r"12 tensors have another dtype.*float32.*bfloat16.*sleep_mode"):
        BroadcastManager(source, VLLMReceiver(llm, live_layout=True), config)
    llm.llm_engine.vllm_config.model_config.enable_sleep_mode = False
    with pytest.raises(UnsupportedCombination, match="enable_lora"):
        BroadcastManager(ModuleSource(kit.Trainer(1)), VLLMReceiver(llm, live_layout=True), config)
    sliced = kit.FakeLLM(kit.EngineModel(0, 2))
    trainer = kit.Trainer(1)
    before = trainer.model.q_proj.weight.data_ptr()
    manager = BroadcastManager(ModuleSource(trainer), VLLMReceiver(sliced, live_layout=True), config)
    with pytest.raises(UnsupportedCombination, match=r"does not hold whole.*q_proj\.weight"):
        manager.broadcast_to_engine()
    assert trainer.model.q_proj.weight.data_ptr() == before
    assert manager.version == 1  # the copies themselves are done and stay good


def test_an_engine_that_moved_its_weights_is_filled_and_shared_again():
    trainer, engine = nn.Linear(3, 2), nn.Linear(3, 2)
    manager = BroadcastManager.connect(trainer, engine, BroadcastConfig(share_weights=True))
    manager.broadcast_to_engine()
    engine.weight.data = torch.full((2, 3), float("nan"))  # slept: other memory, no content
    manager.broadcast_to_engine()
    assert engine.weight.data_ptr() == trainer.weight.data_ptr()
    assert bool(torch.isfinite(engine.weight).all())
