"""Several ranks: one error for all, agreement before the first byte, LoRA on sharded models."""

import copy
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rft_sync import (
    BroadcastConfig,
    BroadcastManager,
    EngineNotReady,
    EngineRefused,
    FSDPSource,
    ManifestMismatch,
    ModuleReceiver,
    ModuleSource,
    NonFiniteWeight,
    RecordingReceiver,
    UnknownTensor,
    UnsupportedCombination,
    VerificationFailed,
    source_for,
    verify,
)
from rft_sync.testing import RankError, check_source, spawn_ranks

sys.path.insert(0, str(Path(__file__).parent))
from small_net import Net, adapted, assert_sends


def _sharded(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


class Faulty(RecordingReceiver):
    """Fails on one rank at one step."""

    def __init__(self, fails, step):
        super().__init__()
        self.fails, self.step = fails, step

    def _maybe(self, step):
        if self.fails and step == self.step:
            raise EngineRefused(f"planned in {step}")

    def start(self, manifest):
        self._maybe("start")
        super().start(manifest)

    def load(self, bucket):
        self._maybe("load")
        super().load(bucket)

    def finish(self, version):
        self._maybe("finish")
        super().finish(version)

    def read_back(self, name):
        parts = super().read_back(name)
        return [part + 1 for part in parts] if self.fails and self.step == "verify" else parts


def _raises(kind, call):
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def _one_error_for_all(rank):
    messages = []
    for step, kind in [
        ("start", EngineRefused),
        ("load", EngineRefused),
        ("finish", EngineRefused),
        ("verify", VerificationFailed),
    ]:
        receiver = Faulty(rank == 1, step)
        manager = BroadcastManager(source_for(_sharded(Net(1))), receiver, BroadcastConfig(bucket_bytes=100))
        messages.append(_raises(kind, manager.broadcast_to_engine))
        assert manager.version == 0
        assert receiver.session.usable == (step == "start")
        receiver.step = None
        assert manager.broadcast_to_engine().version == 1
        assert receiver.session.usable
    return messages


def test_a_failure_on_one_rank_is_the_same_error_on_all_and_the_next_update_repairs():
    first, second = spawn_ranks(_one_error_for_all, 2)
    assert first == second
    assert [message.startswith("rank 1: ") for message in first] == [True] * 4
    assert "planned in load" in first[1]


def _disagreements(rank):
    found = []
    shape = BroadcastManager(ModuleSource(nn.Linear(2 + rank, 2)), RecordingReceiver())
    found.append(_raises(ManifestMismatch, shape.broadcast_to_engine))
    config = BroadcastConfig(bucket_bytes=100 + rank)
    found.append(
        _raises(
            ManifestMismatch, BroadcastManager(ModuleSource(Net()), RecordingReceiver(), config).broadcast_to_engine
        )
    )
    version = BroadcastManager(ModuleSource(Net()), RecordingReceiver())
    found.append(_raises(ManifestMismatch, lambda: version.broadcast_to_engine(1 + rank)))
    meta = ModuleSource(Net())
    if rank == 0:
        meta.model.q_proj.to("meta")
    found.append(_raises(UnsupportedCombination, BroadcastManager(meta, RecordingReceiver()).broadcast_to_engine))
    nan = Net()
    with torch.no_grad():
        nan.embed.weight[4, 0] = float("nan")  # lies in the last rank's shard
    found.append(
        _raises(NonFiniteWeight, BroadcastManager(source_for(_sharded(nan)), RecordingReceiver()).broadcast_to_engine)
    )
    return found


def test_ranks_agree_before_the_first_byte():
    first, second = spawn_ranks(_disagreements, 2)
    assert first == second
    assert first[3].startswith("rank 0: meta parameter q_proj.weight")
    assert "embed.weight" in first[4]


def _absent_ranks(rank):
    source, receiver, engine = ModuleSource(Net()), RecordingReceiver(), ModuleReceiver(Net(3))
    manager = BroadcastManager(source, receiver)
    impatient = BroadcastManager(source, receiver, BroadcastConfig(attendance_seconds=0.5))
    manager.broadcast_to_engine()
    BroadcastManager(source, engine).broadcast_to_engine()
    found = []
    if rank == 0:
        found = [_raises(ManifestMismatch, impatient.broadcast_to_engine) for _ in range(2)]
        found.append(_raises(ManifestMismatch, lambda: verify(source, engine, attendance_seconds=0.5)))
        assert receiver.session.usable
    dist.barrier()
    assert manager.broadcast_to_engine().version == 2
    assert len(verify(source, engine).names) == 6
    return found


def test_a_call_on_one_rank_alone_names_the_ranks_that_stayed_away():
    found, _ = spawn_ranks(_absent_ranks, 2)
    assert [message.split(" within")[0] for message in found] == [
        "ranks [1] of 2 did not call broadcast_to_engine",
        "ranks [1] of 2 did not call broadcast_to_engine",
        "ranks [1] of 2 did not call verify",
    ]


def _other_names(rank):
    model = Net()
    source, engine = ModuleSource(model), ModuleReceiver(Net(3))
    BroadcastManager(source, engine).broadcast_to_engine()
    wrong = ["no.such"] if rank == 1 else ["embed.weight"]
    found = [_raises(UnknownTensor, lambda: verify(source, engine, wrong))]
    wrong = ["lm_head.weight"] if rank == 1 else ["embed.weight"]
    found.append(_raises(ManifestMismatch, lambda: verify(source, engine, wrong)))
    if rank == 1:
        with torch.no_grad():
            model.k_proj.bias[0] = float("nan")
    found.append(_raises(NonFiniteWeight, BroadcastManager(source, engine).broadcast_to_engine))
    assert engine.session.usable  # on the other rank nothing had been copied either
    return found


def test_ranks_agree_on_what_they_verify_and_on_nan_before_any_of_them_copies():
    first, second = spawn_ranks(_other_names, 2)
    assert first == second


def _kinds_of_models(rank):
    reference = Net(4).state_dict()
    ddp = DistributedDataParallel(Net(4))
    check_source(source_for(ddp), reference)
    assert isinstance(source_for(ddp), ModuleSource)
    check_source(source_for(_sharded(Net(4)), dtype=torch.bfloat16), reference)
    source = FSDPSource(_sharded(Net(4)), direct_bytes=1, wire_bytes=1)
    check_source(source, reference)
    engine = Net(5)
    report = BroadcastManager.connect(ddp, engine).broadcast_to_engine()
    assert all(torch.equal(engine.state_dict()[name], value) for name, value in reference.items())
    return report.fingerprint


def test_ddp_and_fsdp2_pass_the_conformance_kit_with_one_fingerprint():
    first, second = spawn_ranks(_kinds_of_models, 2)
    assert first == second


def _lora(rank):
    torch.manual_seed(2)
    plain, expected = adapted(Net(6), "lm_head")
    merged = Net()
    merged.load_state_dict(expected)
    torch.testing.assert_close(merged(torch.arange(5)), plain(torch.arange(5)))
    for wrapped in (_sharded(copy.deepcopy(plain)), nn.parallel.DistributedDataParallel(copy.deepcopy(plain))):
        assert_sends(wrapped, expected)


def test_merged_lora_under_fsdp2_and_ddp_is_bit_equal_to_the_plain_model():
    pytest.importorskip("peft")
    spawn_ranks(_lora, 2)


def _dies(rank):
    if rank == 1:
        os._exit(3)
    dist.barrier()


def _fails(rank):
    raise EngineNotReady(f"planned on {rank}")


def _hangs(rank):
    time.sleep(60)


def test_the_harness_reports_failures_deaths_and_hangs():
    with pytest.raises(RankError, match="planned on"):
        spawn_ranks(_fails, 1)
    with pytest.raises(RankError, match=r"died|failed"):
        spawn_ranks(_dies, 2)
    with pytest.raises(RankError, match="did not finish within 3"):
        spawn_ranks(_hangs, 1, timeout_seconds=3)
