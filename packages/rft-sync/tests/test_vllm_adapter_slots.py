"""What a slot of vLLM's LoRA buffers must hold, by hand; no vLLM is needed for the arithmetic."""

import json

import pytest
import torch
from torch import nn

from rft_sync import AdapterSource
from rft_sync.receivers.vllm_adapter import FactorSlot, scaling

peft = pytest.importorskip("peft")


def test_a_slice_is_scaled_rounded_once_and_laid_into_a_corner_of_zeros():
    factor = torch.arange(1.0, 13.0).view(6, 2)  # B of rank 2; this rank keeps rows 2 and 3
    slot = FactorSlot(torch.full((1, 1, 2, 4), 7.0), rows=(2, 4))
    assert slot.filled(factor, 3.0).tolist() == [[15, 18, 0, 0], [21, 24, 0, 0]]
    # A of rank 2, of which this rank keeps the last two columns, in a buffer for rank 3
    first = FactorSlot(torch.full((1, 1, 3, 2), 7.0), columns=(2, 4))
    assert first.filled(torch.arange(8.0).view(2, 4), 1.0).tolist() == [[2, 3], [6, 7], [0, 0]]
    # In bfloat16 1 + 2^-8 is 1 before it is multiplied; 3 * 1.0078125 lies between 3.015625 and 3.03125, the even one.
    rounded = FactorSlot(torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16))
    assert rounded.filled(torch.tensor([[1 + 2**-8]]), 3.0).item() == 3.0
    assert rounded.filled(torch.tensor([[1.0078125]], dtype=torch.bfloat16), 3.0).item() == 3.03125


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"q_proj": 3.0, "k_proj": 3.0}),
        ({"use_rslora": True}, {"q_proj": 6.0, "k_proj": 6.0}),
        ({"alpha_pattern": {"k_proj": 2}}, {"q_proj": 3.0, "k_proj": 0.5}),
        ({"rank_pattern": {"q_proj": 2}}, {"q_proj": 6.0, "k_proj": 3.0}),
    ],
)
def test_the_scale_is_peft_s_own(options, expected):
    net = nn.ModuleDict({"attn": nn.ModuleDict({"q_proj": nn.Linear(4, 4), "k_proj": nn.Linear(4, 4)})})
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "k_proj"], **options)
    model = peft.get_peft_model(net, config)
    source = AdapterSource(model)
    sent = {meta.name: meta.shape for meta in source.metadata()}
    written = json.loads(source.adapter_config())
    layers = model.base_model.model["attn"]
    for name, scale in expected.items():
        rank = sent[f"base_model.model.attn.{name}.lora_B.weight"][1]
        assert scaling(written, f"attn.{name}", rank) == layers[name].scaling["default"] == scale
