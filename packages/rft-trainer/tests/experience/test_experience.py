"""An experience and its copy on another device."""

import torch

from rft_trainer.experience.experience import placeholder


def test_a_copy_on_another_device_has_every_tensor_there():
    row = placeholder([])
    moved = row.to(torch.device("meta"))
    there = {name: value.device.type for name, value in vars(moved).items() if isinstance(value, torch.Tensor)}
    assert set(there.values()) == {"meta"}
    assert there.keys() == {name for name, value in vars(row).items() if isinstance(value, torch.Tensor)}
    assert row.prompt_ids.device.type == "cpu"
    assert moved.group == row.group
