"""What several tests on ranks send: a model that runs, with q and k as a fused group, and adapters on such models."""

import torch
from torch import nn

from rft_sync import BroadcastConfig, BroadcastManager, RecordingReceiver, source_for


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 6)
        self.q_proj, self.k_proj = nn.Linear(6, 6), nn.Linear(6, 3)
        self.lm_head = nn.Linear(6, 5, bias=False)

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.lm_head(torch.tanh(self.q_proj(hidden)) + self.k_proj(hidden).sum(-1, keepdim=True))


def adapted(net, kept):
    """(`net` under adapters that are not zero, `kept` trained beside them; what it sends merged as a plain model)."""
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj"], modules_to_save=[kept])
    plain = peft.get_peft_model(net, config)
    for name, parameter in plain.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    receiver = RecordingReceiver()
    BroadcastManager(source_for(plain), receiver).broadcast_to_engine()
    return plain, receiver.tensors


def assert_sends(model, expected):
    """Three updates in small buckets, each bit-equal to `expected`."""
    receiver = RecordingReceiver()
    manager = BroadcastManager(source_for(model), receiver, BroadcastConfig(bucket_bytes=100))
    for _ in range(3):
        manager.broadcast_to_engine()
        assert set(receiver.tensors) == set(expected)
        for name, value in expected.items():
            assert torch.equal(receiver.tensors[name], value), name
