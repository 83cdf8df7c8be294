"""DeepSpeed sources: stages 1, 2 and 3 equal a plain model trained alike."""

import copy
import ctypes
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rft_sync import (
    BroadcastConfig,
    BroadcastManager,
    RecordingReceiver,
    UnsupportedCombination,
    ZeroSource,
    source_for,
)
from rft_sync.testing import spawn_ranks

sys.path.insert(0, str(Path(__file__).parent))
from small_net import adapted, assert_sends


class Net(nn.Module):
    """Sizes that two ranks cannot share evenly, a tie, a persisted small parameter, a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 7)
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(7, 7), nn.Linear(7, 3), nn.Linear(7, 3)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias", torch.ones(2))

    def forward(self, ids):
        hidden = self.norm(self.embed(ids))
        hidden = self.q_proj(hidden) + self.k_proj(hidden).sum() + self.v_proj(hidden).sum()
        return self.head(hidden).pow(2).mean()


def _stages(rank):
    found = [_zero(stage) for stage in (1, 2, 3)]
    for stage in (1, 2, 3):
        _merged_lora(stage)
    return found


def _merged_lora(stage):
    """Merged under every stage bit-equal to the plain model, the adapters gathered with their bases."""
    import deepspeed

    torch.manual_seed(2)
    plain, expected = adapted(Net(), "norm")
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_settings(stage))
    assert_sends(engine, expected)


def _alone(rank):
    """Stage 3 on one rank: nothing is gathered, the engine is filled from the shards themselves."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.comm import torch as deepspeed_torch

    deepspeed_torch.build_shm_op = lambda: None  # compiled for minutes; gloo does the work here
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    model, target = Net(), Net()
    expected = copy.deepcopy(model).state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_settings(3))
    manager = BroadcastManager.connect(engine, target, BroadcastConfig(verify="all"))
    manager.source.gather = None  # no bucket is filled
    for factor in (1.0, 2.0):
        for parameter in model.parameters():
            parameter.ds_tensor.mul_(factor)
        assert manager.broadcast_to_engine().tensors_verified == len(expected)
        for name, value in target.state_dict().items():
            assert torch.equal(value, expected[name] * (1.0 if name == "bias" else factor)), name
    with pytest.raises(UnsupportedCombination, match="DeepSpeed keeps its parameters"):
        BroadcastManager.connect(engine, target, BroadcastConfig(share_weights=True))
    return True


def test_stage_3_on_one_rank_needs_no_bucket():
    pytest.importorskip("deepspeed")
    assert spawn_ranks(_alone, 1, timeout_seconds=400) == [True]


def _settings(stage):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
    }


def _zero(stage):
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.comm import torch as deepspeed_torch

    deepspeed_torch.build_shm_op = lambda: (
        None
    )  # its all-reduce kernel is compiled for minutes; gloo does the work here
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(0)
    plain = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    reference = torch.optim.SGD(plain.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_settings(stage))
    source = source_for(engine)
    assert isinstance(source, ZeroSource)
    receiver = RecordingReceiver()
    manager = BroadcastManager(source, receiver, BroadcastConfig(bucket_bytes=128, verify="all"))
    ids = torch.tensor([[1, 2, 8]])
    reports = []
    for _ in range(2):
        engine.backward(engine(ids))
        engine.step()
        plain(ids).backward()
        reference.step()
        reference.zero_grad()
        reports.append(manager.broadcast_to_engine())
        expected = plain.state_dict()
        assert set(receiver.tensors) == set(expected)
        for name, value in expected.items():
            assert receiver.tensors[name].shape == value.shape, name
            torch.testing.assert_close(receiver.tensors[name], value)
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            for name, value in model.state_dict().items():
                assert torch.equal(receiver.tensors[name], value), name
        assert receiver.tensors["head.weight"] is receiver.tensors["embed.weight"]
    if stage == 3:  # nothing of the gathers stays: only persisted parameters are available
        gathered = [p.ds_id for p in model.parameters() if p.ds_status.name == "AVAILABLE" and not p.ds_persist]
        assert gathered == []
    return [report.fingerprint for report in reports]


def test_zero_stages_equal_a_plain_model_and_deepspeeds_own_gather():
    pytest.importorskip("deepspeed")
    pytest.importorskip("peft")
    results = spawn_ranks(_stages, 2, timeout_seconds=400)
    assert results[0] == results[1]
    for first, second in results[0]:
        assert first != second  # the second update carries the second step


class Discards:
    """A receiver that looks at the shapes and keeps nothing."""

    def __init__(self):
        self.shapes = {}

    def start(self, manifest):
        self.shapes = {}

    def load(self, bucket):
        self.shapes.update({name: tuple(tensor.shape) for name, tensor in bucket})

    def finish(self, version):
        pass

    def abort(self, reason):
        pass


def _resident_peak():
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _ten_of_100_megabytes(rank):
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.comm import torch as deepspeed_torch

    deepspeed_torch.build_shm_op = lambda: None  # compiled for minutes; gloo does the work here
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = nn.Module()
    model.weights = nn.ParameterList([nn.Parameter(torch.full((5000, 5000), float(i))) for i in range(10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_settings(3))
    receiver = Discards()
    source = source_for(engine)
    entered = []
    gather = source.gather
    source.gather = lambda names: entered.append(tuple(names)) or gather(names)
    manager = BroadcastManager(source, receiver, BroadcastConfig(bucket_bytes=256_000_000, verify="off"))
    shards = sum(parameter.ds_tensor.nbytes for parameter in model.parameters())
    peaks = []
    for _ in range(2):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        steady = _resident_peak()
        report = manager.broadcast_to_engine()
        peaks.append((_resident_peak() - steady, report.peak_extra_bytes))
    partitioned = all(parameter.ds_status.name == "NOT_AVAILABLE" for parameter in model.parameters())
    return receiver.shapes, entered, peaks, shards, partitioned


@pytest.mark.slow
def test_ten_tensors_of_100_megabytes_need_two_buckets_and_no_more():
    pytest.importorskip("deepspeed")
    results = spawn_ranks(_ten_of_100_megabytes, 2, timeout_seconds=500)
    assert results[0][1] == results[1][1]  # every rank enters each gather
    for shapes, entered, peaks, shards, partitioned in results:
        assert shapes == {f"weights.{index}": (5000, 5000) for index in range(10)}
        assert len(entered) == 2 * 5
        assert shards == 500_000_000
        assert partitioned
        for resident, counted in peaks:
            assert counted <= 512_000_000
            assert resident <= 700_000_000
