import pytest
import torch
from torch import nn

from rft_trainer.errors import ConfigurationError
from rft_trainer.optim import MovingAverage


def test_average_follows_the_weights():
    weight = nn.Parameter(torch.tensor([1.0]))
    average = MovingAverage([("w", weight)], 0.9)
    for value in (2.0, 3.0):
        with torch.no_grad():
            weight.fill_(value)
        average.update([("w", weight)])
    # 0.9 * (0.9 * 1 + 0.1 * 2) + 0.1 * 3
    assert average.state_dict()["w"].item() == pytest.approx(1.29)


def test_average_of_bf16_weights_keeps_small_steps():
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    average = MovingAverage([("w", weight)], 0.999)
    with torch.no_grad():
        weight.fill_(2.0)
    average.update([("w", weight)])
    assert average.state_dict()["w"].item() == pytest.approx(1.001)


def test_weights_come_back_after_the_context_even_on_failure():
    module = nn.Linear(2, 1)
    start = module.weight.detach().clone()
    average = MovingAverage(module.named_parameters(), 0.0)
    with torch.no_grad():
        module.weight.add_(1.0)
    seen = []

    def fail():
        with average.applied(module.named_parameters()):
            seen.append(module.weight.detach().clone())
            raise RuntimeError("evaluation failed")

    with pytest.raises(RuntimeError, match="evaluation failed"):
        fail()
    assert seen[0].equal(start)
    assert module.weight.equal(start + 1.0)


def test_average_shares_no_memory_with_its_weight_and_resumes():
    module = nn.Linear(2, 1)
    average = MovingAverage(module.named_parameters(), 0.5)
    saved = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    with torch.no_grad():
        module.weight.add_(4.0)
    assert average.state_dict()["weight"].equal(saved["weight"])
    other = MovingAverage(module.named_parameters(), 0.5)
    other.load_state_dict(saved)
    other.update(module.named_parameters())
    torch.testing.assert_close(other.state_dict()["weight"], saved["weight"] + 2.0)


def test_other_names_raise():
    average = MovingAverage([("w", torch.zeros(1))], 0.5)
    with pytest.raises(ValueError, match="'v', 'w'"):
        average.update([("v", torch.zeros(1))])
    with pytest.raises(ConfigurationError, match=r"decay.*1\.0"):
        MovingAverage([], 1.0)
