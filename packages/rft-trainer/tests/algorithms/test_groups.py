import pytest
import torch
from torch.testing import assert_close

from rft_trainer.algorithms import Moments, group_mean, group_norm, informative_groups, reinforce_baseline, rloo
from rft_trainer.errors import ConfigurationError

MIXED = torch.tensor([1.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize(("std", "expected"), [("sample", 0.866025), ("population", 1.0)])
def test_group_norm_of_a_mixed_group(std, expected):
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0])
    assert_close(group_norm(MIXED, 4, std=std), signs * expected, atol=3e-6, rtol=0)


def test_group_norm_of_eight():
    rewards = torch.tensor([1, 1, 0.9, 0.1, 0.1, 0.1, 0, 0])
    expected = torch.tensor([1.27098, 1.27098, 1.05915, -0.63549, -0.63549, -0.63549, -0.84732, -0.84732])
    assert_close(group_norm(rewards, 8), expected, atol=5e-6, rtol=0)


def test_leave_one_out_and_group_mean():
    assert_close(rloo(MIXED, 4), torch.tensor([2, -2, -2, 2]) / 3)
    assert_close(
        rloo(torch.tensor([1, 0.9, 0.1, 0]), 4), torch.tensor([0.66667, 0.53333, -0.53333, -0.66667]), atol=1e-5, rtol=0
    )
    assert group_mean(MIXED, 4).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert reinforce_baseline(MIXED, 4).tolist() == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("none", [0.5, -0.5, 0, 0]),
        ("group", [0.70701, -0.70701, 0, 0]),
        ("batch", [0.9998, -0.9998, 0, 0]),
    ],
)
def test_scale_option(scale, expected):
    scaled = group_norm(torch.tensor([1.0, 0, 1, 1]), 2, eps=1e-4, scale=scale)
    assert_close(scaled, torch.tensor(expected), atol=5e-6, rtol=0)


def test_batch_scale_takes_moments_of_all_ranks():
    moments = Moments.of(torch.tensor([1.0, 0.0])) + Moments.of(torch.tensor([1.0, 1.0]))
    scaled = group_norm(torch.tensor([1.0, 0.0]), 2, eps=1e-4, scale="batch", moments=moments)
    assert_close(scaled, torch.tensor([0.9998, -0.9998]), atol=1e-6, rtol=0)


def test_unknown_words_raise():
    with pytest.raises(ConfigurationError, match=r"'true'.*'group', 'batch' or 'none'"):
        group_norm(MIXED, 4, scale="true")
    with pytest.raises(ConfigurationError, match="'biased'"):
        group_norm(MIXED, 4, std="biased")


@pytest.mark.parametrize("size", [2, 3, 7, 64])
@pytest.mark.parametrize("value", [0.1, -0.3, 1e-8, 1 / 3, 12345.678])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_without_spread_gives_exactly_zero(size, value, scale):
    rewards = torch.cat([torch.full((size,), value), torch.arange(size, dtype=torch.float32)])
    for baselined in (group_norm(rewards, size, scale=scale), rloo(rewards, size), group_mean(rewards, size)):
        assert baselined[:size].tolist() == [0.0] * size
        assert baselined[size:].abs().max() > 0


@pytest.mark.parametrize("function", [group_norm, rloo, group_mean, reinforce_baseline])
def test_groups_of_one_give_zero_never_nan(function):
    assert function(torch.tensor([0.7, 0.2]), 1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("function", [group_norm, rloo, group_mean])
def test_order_of_responses_and_groups_changes_nothing(function):
    rewards = torch.rand(4, 8, generator=torch.Generator().manual_seed(3))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(4))
    plain = function(rewards.reshape(-1), 8).reshape(4, 8)
    assert_close(function(rewards[:, order].reshape(-1), 8).reshape(4, 8), plain[:, order])
    assert_close(function(rewards.flip(0).reshape(-1), 8).reshape(4, 8), plain.flip(0))


@pytest.mark.parametrize(("count", "size"), [(5, 2), (4, 3), (4, 0)])
def test_groups_must_be_whole(count, size):
    with pytest.raises(ValueError, match=f"{count} rewards do not split into groups of {size}"):
        group_mean(torch.zeros(count), size)
    with pytest.raises(ValueError, match=r"\[N\]"):
        group_mean(torch.zeros(2, 2), 2)


def test_filter_looks_at_groups_of_raw_scores():
    scores = torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0])
    assert informative_groups(scores, 4).tolist() == [True, False, False]


def test_filter_by_difficulty():
    scores = torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0])
    assert informative_groups(scores, 4, lowest_mean=0.3).tolist() == [True, True, False]
    assert informative_groups(scores, 4, highest_mean=0.5).tolist() == [False, True, True]
