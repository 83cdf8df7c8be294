"""DeepSpeed sources: stages 1, 2 and 3 equal a plain model trained alike."""

import copy
import os

import pytest
import torch
from torch import nn

from rft_sync import BroadcastConfig, BroadcastManager, RecordingReceiver, ZeroSource, source_for
from rft_sync.testing import spawn_ranks


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
    _merged_lora()
    return found


def _merged_lora():
    """Merged under stage 3 bit-equal to the plain model, the adapters gathered with their bases."""
    import deepspeed
    import peft

    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj"], modules_to_save=["norm"])
    plain = peft.get_peft_model(Net(), config)
    for name, parameter in plain.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    expected, receiver = RecordingReceiver(), RecordingReceiver()
    BroadcastManager(source_for(plain), expected).broadcast_to_engine()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_settings(3))
    manager = BroadcastManager(source_for(engine), receiver, BroadcastConfig(bucket_bytes=100))
    for _ in range(3):
        manager.broadcast_to_engine()
        assert set(receiver.tensors) == set(expected.tensors)
        for name, value in expected.tensors.items():
            assert torch.equal(receiver.tensors[name], value), name


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
