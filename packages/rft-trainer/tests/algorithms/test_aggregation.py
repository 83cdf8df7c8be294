import itertools

import pytest
import torch
from torch.nn.functional import pad
from torch.testing import assert_close

from rft_trainer.algorithms import AGGREGATION_MODES, PolicyLoss, aggregate, loss_denominator, policy_loss, value_loss
from rft_trainer.errors import ConfigurationError

ROWS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 0.0, 0.0, 0.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])


def _length(mode):
    return 4 if mode == "seq-mean-token-sum-norm" else None


def _whole(loss, mask, mode):
    return aggregate(loss, mask, mode, loss_denominator(mask, mode, _length(mode)))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 4.0),
        ("seq-mean-token-mean", 6.25),
        ("seq-mean-token-sum", 10.0),
        ("seq-mean-token-sum-norm", 2.5),
    ],
)
def test_values(mode, expected):
    assert _whole(ROWS, MASK, mode).item() == expected


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("split", [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 0], [2, 1]], [[0], [1, 2, 3]]])
def test_one_global_denominator_makes_every_split_equal(mode, split):
    loss = torch.tensor([[1.0, 1, 1, 1], [5, 0, 0, 0], [2, 9, 3, 9], [9, 9, 9, 9]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    denominator = sum(loss_denominator(mask[part], mode, _length(mode)) for part in split)
    parts = sum(aggregate(loss[part], mask[part], mode, denominator) for part in split)
    assert_close(parts, _whole(loss, mask, mode))


def test_token_mean_of_two_micro_batches_is_no_mean_of_means():
    loss, mask = torch.tensor([[1.0, 1, 1, 1], [5, 0, 0, 0]]), MASK
    denominator = loss_denominator(mask[:1], "token-mean") + loss_denominator(mask[1:], "token-mean")
    parts = [aggregate(loss[row : row + 1], mask[row : row + 1], "token-mean", denominator) for row in range(2)]
    assert sum(parts).item() == pytest.approx(1.8)


def test_ranks_with_few_tokens_do_not_weigh_more():
    ranks = [torch.tensor([[1.0, 3.0]]), torch.full((1, 6), 5.0)]
    denominator = sum(loss_denominator(torch.ones_like(rank), "token-mean") for rank in ranks)
    total = sum(aggregate(rank, torch.ones_like(rank), "token-mean", denominator) for rank in ranks)
    assert total.item() == 4.25


def test_masked_out_rows_leave_the_divisor():
    loss = torch.ones(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    for mode, expected in (("token-mean", 1.0), ("seq-mean-token-mean", 1.0), ("seq-mean-token-sum", 4.0)):
        assert _whole(loss, mask, mode).item() == expected


def test_tool_tokens_do_not_count():
    mask = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0, 1, 1]])
    assert _whole(torch.full((1, 10), 2.0), mask, "token-mean").item() == 2.0


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_nothing_to_train_on_is_zero_and_joins_the_graph(mode):
    loss = torch.ones(2, 3, requires_grad=True)
    total = _whole(loss, torch.zeros(2, 3), mode)
    total.backward()
    assert total.item() == 0.0
    assert loss.grad.eq(0).all()


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_a_rank_without_rows_joins(mode):
    empty = torch.zeros(0, 3, requires_grad=True)
    total = aggregate(empty, torch.zeros(0, 3), mode, loss_denominator(MASK, mode, _length(mode)))
    total.backward()
    assert total.item() == 0.0


def test_critic_loss_is_the_same_for_every_split():
    returns, mask = torch.zeros(1, 8), torch.ones(1, 8)
    values = torch.tensor([[1.0] * 6 + [5.0**0.5] * 2])
    denominator = loss_denominator(mask, "token-mean")
    for cuts in ([0, 6, 8], [0, 8], [0, 2, 5, 8]):
        parts = 0.0
        for start, stop in itertools.pairwise(cuts):
            piece = (slice(None), slice(start, stop))
            loss = value_loss(values[piece], values[piece], returns[piece], mask[piece]).loss
            parts += aggregate(loss, mask[piece], "token-mean", denominator).item()
        assert parts == pytest.approx(1.0)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("kind", PolicyLoss.names())
def test_gradient_of_every_loss_is_independent_of_the_split_and_the_padding(kind, mode):
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(8, generator=generator)
    features = torch.randn(6, 5, 8, generator=generator)
    old, advantages = torch.randn(6, 5, generator=generator) - 1, torch.randn(6, 1, generator=generator).repeat(1, 5)
    mask = torch.arange(5)[None, :] < torch.tensor([5, 2, 0, 4, 1, 3])[:, None]
    mask[3, 1] = False
    length = 9 if mode == "seq-mean-token-sum-norm" else None

    def gradient(parts, padding=(0, 0)):
        leaf = weight.clone().requires_grad_()
        denominator = sum(loss_denominator(mask[part], mode, length) for part in parts)
        for part in parts:
            log_probs = torch.tanh(features[part] @ leaf) - 1
            cells = [pad(cell, padding) for cell in (log_probs, old[part], advantages[part], mask[part])]
            loss = policy_loss(*cells, kind=kind).loss
            aggregate(loss, cells[-1], mode, denominator).backward()
        return leaf.grad

    whole = gradient([[0, 1, 2, 3, 4, 5]])
    assert whole.abs().max() > 0
    for parts in ([[0, 1, 2], [3, 4, 5]], [[index] for index in range(6)], [[5, 0], [2], [3, 1, 4]]):
        assert_close(gradient(parts), whole, rtol=1e-5, atol=1e-6)
    for padding in ((3, 0), (0, 4)):
        assert_close(gradient([[0, 1, 2, 3, 4, 5]], padding), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "length"), [("token-mean", 4), ("seq-mean-token-sum-norm", None), ("seq-mean-token-sum-norm", 0)]
)
def test_fixed_length_belongs_to_its_mode(mode, length):
    with pytest.raises(ConfigurationError, match=f"fixed_length {length}"):
        loss_denominator(MASK, mode, length)


def test_unknown_mode_lists_the_modes():
    with pytest.raises(ConfigurationError, match=r"'mean'.*token-mean, seq-mean-token-mean"):
        aggregate(ROWS, MASK, "mean", 1.0)
