"""FSDP2 sources on gloo ranks: equal to the unsharded model, whatever the shard sizes."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from rft_sync import BroadcastConfig, BroadcastManager, FSDPSource, ModuleReceiver, RecordingReceiver, source_for
from rft_sync.testing import spawn_ranks


class Uneven(nn.Module):
    """Rows that 2 and 4 ranks cannot share evenly, an empty shard, a tie, a buffer, an fp32 exception."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.q_proj = nn.Linear(6, 3)
        self.k_proj = nn.Linear(6, 1)
        self.v_proj = nn.Linear(6, 1)
        self.norm = nn.LayerNorm(6)
        self.big = nn.Linear(6, 50, bias=False)
        self.lm_head = nn.Linear(6, 7, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("router_bias", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids):
        hidden = self.norm(self.embed(ids))
        hidden = hidden + self.q_proj(hidden).sum() + self.k_proj(hidden) + self.v_proj(hidden)
        return self.lm_head(hidden) + self.big(hidden).mean() + self.router_bias.sum()


def _model():
    torch.manual_seed(3)
    return Uneven()


def _whole_mesh(rank, world):
    return init_device_mesh("cpu", (world,))


def _check(model, reference, bucket_bytes, dtype=None, direct_bytes=1 << 20):
    source = FSDPSource(model, dtype=dtype, direct_bytes=direct_bytes, wire_bytes=400)
    receiver = RecordingReceiver()
    manager = BroadcastManager(source, receiver, BroadcastConfig(bucket_bytes=bucket_bytes, verify="all"))
    report = manager.broadcast_to_engine()
    expected = reference.state_dict()
    assert set(receiver.tensors) == set(expected)
    for name, value in expected.items():
        assert torch.equal(receiver.tensors[name], value.to(receiver.tensors[name].dtype)), name
        assert receiver.tensors[name].dtype == (dtype if dtype and value.is_floating_point() else value.dtype)
    assert report.tensors_sent == report.tensors_loaded == report.tensors_expected == len(expected)
    assert (report.buffers, report.aliases, report.skipped_buffers) == (1, 1, 1)
    return report


def _equal_to_unsharded(rank, world):
    reference = _model()
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.big, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for bucket_bytes in (1, 200, 1 << 20):
        for dtype in (None, torch.bfloat16):
            for direct_bytes in (1, 100, 1 << 20):
                _check(model, reference, bucket_bytes, dtype, direct_bytes)
    # a forward alone leaves the root gathered; the source reads the shards all the same
    model(torch.tensor([0, 1]))
    _check(model, reference, 200)
    assert isinstance(source_for(model), FSDPSource)
    # one step of training: nothing of the earlier values is remembered
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = torch.optim.SGD(reference.parameters(), lr=0.1)
    model(torch.tensor([0, 1])).sum().backward()
    reference(torch.tensor([0, 1])).sum().backward()
    optimizer.step()
    whole.step()
    receiver = RecordingReceiver()
    BroadcastManager(source_for(model), receiver).broadcast_to_engine()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(receiver.tensors[name], value)
    return sorted(receiver.tensors)


def _policies_and_meshes(rank):
    reference = _model()
    hsdp = copy.deepcopy(reference)
    fully_shard(hsdp, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    _check(hsdp, reference, 300)
    offloaded = copy.deepcopy(reference)
    fully_shard(
        offloaded,
        mesh=init_device_mesh("cpu", (4,)),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    _check(offloaded, reference, 300, torch.bfloat16)
    columns = copy.deepcopy(reference)
    from torch.distributed.tensor import Shard

    fully_shard(
        columns,
        mesh=init_device_mesh("cpu", (4,)),
        shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 4 == 0 else None,
    )
    _check(columns, reference, 300)
    engine = copy.deepcopy(reference).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.zero_()
    report = BroadcastManager.connect(hsdp, engine).broadcast_to_engine()
    assert report.casts == {"float32->bfloat16": 11}
    assert torch.equal(engine.embed.weight, reference.embed.weight.to(torch.bfloat16))
    assert engine.lm_head.weight is engine.embed.weight
    assert isinstance(ModuleReceiver(engine).expected(), tuple)


def test_shards_of_any_size_equal_the_whole_model_on_2_ranks():
    names = spawn_ranks(_equal_to_unsharded, 2, 2)
    assert names[0] == names[1]


def test_policies_hsdp_offload_columns_and_empty_shards_on_4_ranks():
    spawn_ranks(_policies_and_meshes, 4)
