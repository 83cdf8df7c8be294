import math

import pytest
import torch
from torch.testing import assert_close

from rft_trainer.algorithms import Moments, RunningMoments, masked_mean, metric_max, metric_mean, whiten


def test_masked_mean_of_unmasked_cells_and_with_outer_denominator():
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 7.0, 7.0, 7.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    assert masked_mean(values, mask).item() == 4.0
    assert masked_mean(values, mask, 10).item() == 2.0


def test_masked_mean_ignores_what_is_not_finite_behind_the_mask():
    values = torch.tensor([1.0, math.nan, math.inf], requires_grad=True)
    mean = masked_mean(values, torch.tensor([True, False, False]))
    mean.backward()
    assert mean.item() == 1.0
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


def test_masked_mean_without_cells_is_zero_with_a_graph():
    values = torch.ones(3, requires_grad=True)
    mean = masked_mean(values, torch.zeros(3))
    mean.backward()
    assert mean.item() == 0.0
    assert values.grad.tolist() == [0.0, 0.0, 0.0]


def test_shapes_that_differ_are_named():
    with pytest.raises(ValueError, match=r"values \(2, 3\), mask \(2, 2\)"):
        masked_mean(torch.ones(2, 3), torch.ones(2, 2))


def test_whitening_over_two_ranks_uses_moments_of_both():
    ranks = [torch.tensor([[1.0, 3.0]]), torch.tensor([[5.0, 7.0]])]
    mask = torch.ones(1, 2)
    moments = Moments.of(ranks[0], mask) + Moments.of(ranks[1], mask)
    both = torch.cat([whiten(rank, mask, moments=moments) for rank in ranks], dim=1)
    assert_close(both, torch.tensor([[-1.34164, -0.44721, 0.44721, 1.34164]]), atol=1e-5, rtol=0)
    assert_close(whiten(ranks[0], mask), torch.tensor([[-1.0, 1.0]]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("unbiased", "expected"), [(False, 1.0), (True, 0.866025)])
def test_whitening_joins_a_rank_without_tokens(unbiased, expected):
    low, high, empty = torch.zeros(1, 2), torch.full((1, 2), 2.0), torch.full((1, 2), 77.0)
    mask, nothing = torch.ones(1, 2), torch.zeros(1, 2)
    moments = Moments.of(low, mask) + Moments.of(high, mask) + Moments.of(empty, nothing)
    assert_close(whiten(low, mask, moments=moments, unbiased=unbiased), torch.full((1, 2), -expected))
    assert_close(whiten(high, mask, moments=moments, unbiased=unbiased), torch.full((1, 2), expected))
    assert whiten(empty, nothing, moments=moments).tolist() == [[0.0, 0.0]]


def test_whitening_of_one_value_passes_it_through_and_says_so():
    values, mask = torch.tensor([[3.0, 8.0]]), torch.tensor([[1, 0]])
    assert whiten(values, mask).tolist() == [[3.0, 0.0]]
    assert Moments.of(values, mask).is_degenerate
    assert whiten(values, torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]
    assert not Moments.of(values, torch.ones(1, 2)).is_degenerate


def test_whitening_without_centre_keeps_the_sign():
    whitened = whiten(torch.tensor([[1.0, 3.0]]), torch.ones(1, 2), centred=False)
    assert_close(whitened, torch.tensor([[1.0, 3.0]]), atol=1e-6, rtol=0)  # population deviation is 1


@pytest.mark.parametrize("value", [0.0, 0.1, -1.0, 1234.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_without_a_spread_are_not_blown_up(value, dtype):
    values, mask = torch.full((2, 3), value, dtype=dtype), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert whiten(values, mask).eq(0).all()
    assert whiten(values, mask, centred=False).equal(values * mask)
    running = RunningMoments()
    running.update(Moments.of(values))
    assert running.normalise(values, centred=False).equal(values)


def test_a_value_that_is_not_a_number_spoils_all_of_them():
    values = torch.tensor([[1.0, math.nan, 1.0]])
    assert whiten(values, torch.ones(1, 3)).isnan().all()


def test_moments_do_not_lose_small_spread_beside_a_large_mean():
    values = torch.tensor([10_000.0, 10_000.5, 10_001.0], dtype=torch.float64)
    assert Moments.of(values).variance() == pytest.approx(1 / 6, rel=1e-6)


def test_running_moments_are_those_of_everything_seen():
    running = RunningMoments()
    for batch in ([1.0, 3.0], [5.0, 7.0]):
        running.update(Moments.of(torch.tensor(batch)))
    deviation = torch.tensor([1.0, 3.0, 5.0, 7.0]).std().item()
    assert_close(running.normalise(torch.tensor([8.0])), torch.tensor([4.0 / deviation]))
    assert_close(running.normalise(torch.tensor([8.0]), centred=False), torch.tensor([8.0 / deviation]))
    restored = RunningMoments()
    restored.load_state_dict(running.state_dict())
    assert restored.normalise(torch.tensor([8.0])).equal(running.normalise(torch.tensor([8.0])))


def test_running_moments_leave_the_first_reward_alone():
    assert RunningMoments().normalise(torch.tensor([0.7])).tolist() == pytest.approx([0.7])


def test_metrics_weigh_every_token_once():
    # rank 0: 2 tokens of mean 1, rank 1: 8 tokens of mean 0
    parts = [metric_mean(torch.ones(2), torch.ones(2)), metric_mean(torch.zeros(8), torch.ones(8))]
    total, count = sum(float(part.total) for part in parts), sum(float(part.count) for part in parts)
    assert total / count == 0.2
    assert parts[0].mean == 1.0


def test_metrics_hold_no_graph():
    values = torch.ones(3, requires_grad=True) * 2
    assert not metric_mean(values, torch.ones(3)).total.requires_grad
    assert metric_max(values, torch.tensor([1, 0, 1])).value.item() == 2.0
    assert metric_max(torch.zeros(0, 3), torch.zeros(0, 3)).value.item() == 0.0
