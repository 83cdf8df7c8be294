import pytest
import torch

from rft_trainer.errors import ConfigurationError
from rft_trainer.optim import AdamWConfig, ScheduleConfig, build_adamw, build_schedule


def _rates(config, steps, lr=1e-6, state=None):
    """Rates used by the optimiser steps, and the scheduler's state after them."""
    module = torch.nn.Linear(1, 1)
    optimizer = build_adamw(module, AdamWConfig(lr=lr))
    schedule = build_schedule(optimizer, config)
    if state is not None:
        schedule.load_state_dict(state)
        for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step()
        schedule.step()
    return used, schedule.state_dict()


def test_warm_up_counts_optimiser_steps_and_resumes():
    config = ScheduleConfig(warmup_steps=10)
    whole, _ = _rates(config, 12)
    assert whole == pytest.approx([1e-7 * step for step in range(1, 11)] + [1e-6, 1e-6])
    first, state = _rates(config, 5)
    rest, after = _rates(config, 1, state=state)
    assert first[-1] == pytest.approx(5e-7)
    assert rest == pytest.approx([6e-7])
    assert after["last_epoch"] == 6


def test_linear_decay_ends_at_the_minimum():
    config = ScheduleConfig(kind="linear", warmup_steps=2, total_steps=6, min_ratio=0.2)
    used, _ = _rates(config, 8, lr=1.0)
    assert used == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_decay_is_half_way_down_in_the_middle():
    config = ScheduleConfig(kind="cosine", total_steps=4)
    used, _ = _rates(config, 6, lr=1.0)
    assert used == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "step"}, "'step'.*constant, cosine, linear"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"min_ratio": 1.5}, "min_ratio"),
        ({"kind": "cosine"}, "total_steps None"),
        ({"kind": "linear", "warmup_steps": 5, "total_steps": 5}, "total_steps 5"),
    ],
)
def test_numbers_out_of_range_name_themselves(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        ScheduleConfig(**changes)
