import math

import pytest
import torch
from torch.testing import assert_close

from rft_trainer.algorithms import entropy_bonus, expert_balance_loss, expert_counts, high_entropy_mask, value_loss
from rft_trainer.errors import ConfigurationError


def test_value_loss_is_half_the_squared_error():
    values = torch.tensor([[1.0, 3.0, 9.0]], requires_grad=True)
    outputs = value_loss(values, torch.zeros(1, 3), torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[1, 1, 0]]))
    outputs.loss.sum().backward()
    assert outputs.loss.tolist() == [[0.5, 2.0, 0.0]]
    assert values.grad.tolist() == [[1.0, 2.0, 0.0]]
    assert outputs.metrics["value_error"].mean == 2.5


def test_value_loss_reads_nothing_behind_the_mask():
    values = torch.tensor([[1.0, math.nan]], requires_grad=True)
    rest = torch.tensor([[0.0, math.inf]])
    value_loss(values, rest, rest, torch.tensor([[1, 0]]), clip=5.0).loss.sum().backward()
    assert values.grad.tolist() == [[1.0, 0.0]]


def test_value_clip_takes_the_worse_of_both():
    # old 0, clip 0.2, return 1: value 0.5 counts as 0.2; return 0: value 0.5 counts as it is
    values = torch.tensor([[0.5, 0.5]], requires_grad=True)
    outputs = value_loss(values, torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), torch.ones(1, 2), clip=0.2)
    outputs.loss.sum().backward()
    assert_close(outputs.loss.detach(), torch.tensor([[0.5 * 0.64, 0.5 * 0.25]]))
    assert_close(values.grad, torch.tensor([[0.0, 0.5]]))
    assert outputs.metrics["value_clip_fraction"].mean == 0.5
    with pytest.raises(ConfigurationError, match="clip must be positive"):
        value_loss(values, values, values, torch.ones(1, 2), clip=0.0)


def test_entropy_bonus_lowers_the_loss():
    entropy = torch.tensor([[2.0, 3.0]], requires_grad=True)
    bonus = entropy_bonus(entropy, torch.tensor([[1, 0]]), 0.01)
    bonus.sum().backward()
    assert_close(bonus.detach(), torch.tensor([[-0.02, 0.0]]))
    assert_close(entropy.grad, torch.tensor([[-0.01, 0.0]]))


def test_high_entropy_tokens_of_each_response():
    entropy = torch.tensor([[0.1, 0.9, 0.5, 0.3, 0.2], [5.0, 0.2, 0.3, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    chosen = high_entropy_mask(entropy, mask, 0.2)
    assert chosen.int().tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]
    assert high_entropy_mask(entropy, mask, 0.4).sum(dim=1).tolist() == [2, 1, 0]
    assert high_entropy_mask(entropy, mask, 1.0).equal(mask.bool())
    ties = high_entropy_mask(torch.ones(1, 5), torch.ones(1, 5), 0.6)
    assert ties.int().tolist() == [[1, 1, 1, 0, 0]]


@pytest.mark.parametrize("ratio", [0.0, 1.5, -0.2])
def test_high_entropy_ratio_out_of_range(ratio):
    with pytest.raises(ConfigurationError, match="ratio must lie"):
        high_entropy_mask(torch.ones(1, 2), torch.ones(1, 2), ratio)


def test_balanced_experts_give_the_lowest_loss():
    # two experts, one token each way: f = (1/2, 1/2); P = softmax means
    logits = torch.tensor([[1.0, -1.0], [-1.0, 1.0], [9.0, -9.0]])
    mask = torch.tensor([1, 1, 0])
    counts = expert_counts(logits, mask, 1)
    assert counts.tolist() == [1.0, 1.0]
    assert expert_balance_loss(logits, mask, counts, 2).item() == pytest.approx(1.0)
    one_sided = torch.tensor([[9.0, -9.0], [9.0, -9.0]])
    loss = expert_balance_loss(one_sided, torch.ones(2), expert_counts(one_sided, torch.ones(2), 1), 2)
    assert loss.item() == pytest.approx(2.0, abs=1e-5)


def test_expert_balance_adds_up_over_micro_batches():
    generator = torch.Generator().manual_seed(2)
    logits, mask = torch.randn(12, 4, generator=generator), torch.rand(12, generator=generator) > 0.3
    counts, tokens = expert_counts(logits, mask, 2), mask.sum()
    assert counts.sum() == 2 * tokens

    def gradient(cuts):
        leaf = logits.clone().requires_grad_()
        for start, stop in cuts:
            expert_balance_loss(leaf[start:stop], mask[start:stop], counts, tokens).backward()
        return leaf.grad

    assert_close(gradient([(0, 5), (5, 6), (6, 12)]), gradient([(0, 12)]))
