import math
import random

import pytest
import torch
import torch.distributed as dist

from rft_dist import Histogram, Max, Mean, MetricError, Min, Sum, all_reduce_metrics
from rft_dist.testing import run_ranks


def reduce(rank, world_size, metrics):
    return all_reduce_metrics(metrics[rank])


def test_means_are_weighted_by_their_own_counts():
    # Rank 0: 2 tokens of mean KL 1.0; rank 1: 8 tokens of 0.0. A mean of means would be 0.5.
    metrics = [{"kl": Mean(2.0, 2), "loss": 3.0}, {"kl": Mean(0.0, 8), "loss": 1.0}]
    assert run_ranks(reduce, 2, metrics) == [{"kl": 0.2, "loss": 2.0}] * 2


def test_every_kind_is_reduced_with_different_keys_and_empty_ranks():
    metrics = [
        {"sum": Sum(1.5), "max": Max(-4.0), "min": Min(3), "only 0": Mean(6, 3), "none": Mean(0.0, 0)},
        {},
        {"sum": Sum(2), "max": Max(-5.0), "min": Min(-2.0), "plain": 7, "bins": Histogram((0.0, 1.0), (1, 2, 0))},
        {"min": Min(9.0), "plain": torch.tensor(8.0), "bins": Histogram((0.0, 1.0), (0, 5, 4))},
    ]
    results = run_ranks(reduce, 4, metrics)
    expected = {
        "bins": Histogram((0.0, 1.0), (1, 7, 4)),
        "max": -4.0,
        "min": -2.0,
        "only 0": 2.0,
        "plain": 7.5,
        "sum": 3.5,
    }
    for result in results:
        assert math.isnan(result.pop("none"))
        assert result == expected
        assert list(result) == sorted(result)


def split_metrics(rank, world_size, values, masks, owner):
    mine = [i for i in range(len(values)) if owner[i] == rank]
    if not mine:
        return all_reduce_metrics({})
    rows, mask = values[mine], masks[mine]
    return all_reduce_metrics(
        {
            "token mean": Mean.of(rows, mask),
            "sample mean": Mean.of(rows.sum(-1)),
            "sum": Sum(float(rows.double().sum())),
            "max": Max(float(rows.max())),
            "min": Min(float(rows.min())),
            "lengths": Histogram.of(mask.sum(-1), [1, 3, 5]),
        }
    )


def test_the_result_is_the_same_for_every_split_of_the_same_items():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(12, 6, generator=generator)
    masks = torch.rand(12, 6, generator=generator) < 0.6
    splits = [
        (1, [0] * 12),
        (2, [i % 2 for i in range(12)]),
        (4, [0] * 7 + [1] + [3] * 4),
        (4, [3 - i // 3 for i in range(12)]),
    ]
    results = []
    for world_size, owner in splits:
        results += run_ranks(split_metrics, world_size, values, masks, owner)
    assert all(result == results[0] for result in results)
    assert results[0]["token mean"] == pytest.approx(float(values.double()[masks].mean()), abs=1e-12)
    assert results[0]["lengths"].counts == tuple(
        int(((masks.sum(-1) >= low) & (masks.sum(-1) < high)).sum()) for low, high in [(0, 1), (1, 3), (3, 5), (5, 99)]
    )


def count_collectives(rank, world_size, keys):
    calls = []
    original = dist.all_gather

    def counted(*args, **kwargs):
        calls.append("all_gather")
        return original(*args, **kwargs)

    dist.all_gather = counted
    try:
        result = all_reduce_metrics({f"phase/{i}/some metric of the run": Mean(rank, 1) for i in range(keys)})
    finally:
        dist.all_gather = original
    return len(result), len(calls), set(result.values())


@pytest.mark.parametrize(("keys", "collectives"), [(0, 1), (1, 1), (40, 1), (300, 1), (5000, 2)])
def test_one_collective_carries_any_number_of_keys(keys, collectives):
    # Beyond one page (32 KiB of packed metrics) a second one carries the rest.
    for found, calls, values in run_ranks(count_collectives, 2, keys, guard=False):
        assert (found, calls) == (keys, collectives)
        assert values <= {0.5}


def refusal(rank, world_size, metrics):
    try:
        all_reduce_metrics(metrics[rank])
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"a": Sum(1.0)}, "metric 'a' is Mean on one rank and Sum on another"),
        ({"b": Histogram((0.0, 2.0), (1, 2, 0))}, "metric 'b' has other edges on another rank"),
        ({"c": "fast"}, r"metric 'c' is 'fast': give a number, or Mean.*raised on rank 1"),
        ({"c": torch.zeros(3)}, r"metric 'c' is a tensor \(3,\): wrap it in Mean.of"),
        ({5: 1.0}, "metric name 5 is no text"),
    ],
)
def test_what_cannot_be_reduced_is_an_error_on_all_ranks(second, message):
    first, other = run_ranks(refusal, 2, [{"a": 1.0, "b": Histogram((0.0, 1.0), (1, 2, 0))}, second])
    assert first == other
    with pytest.raises(ValueError, match=message):
        raise ValueError(first)


def test_masked_values_do_not_count_even_if_they_are_nan():
    values = torch.tensor([[1.0, float("nan")], [3.0, float("inf")]])
    assert Mean.of(values, torch.tensor([[1, 0], [1, 0]])) == Mean(4.0, 2)
    assert Mean.of(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 1.5])) == Mean(5.0, 2.0)
    assert Mean.of([1, 2, 6]) == Mean(9.0, 3)
    with pytest.raises(MetricError, match="differ"):
        Mean.of(values, torch.ones(3))


def test_a_nan_is_seen_wherever_it_stands():
    for order in ([1.0, math.nan], [math.nan, 1.0]):
        results = run_ranks(reduce, 2, [{"max": Max(v), "min": Min(v), "sum": Sum(v), "mean": v} for v in order])
        assert all(math.isnan(value) for result in results for value in result.values())


def test_histograms_count_between_edges():
    assert Histogram.of([-1, 0, 0.5, 1, 2.5, 9], [0, 1, 2]) == Histogram((0.0, 1.0, 2.0), (1, 2, 1, 2))
    assert Histogram.of(torch.tensor([1.0, math.nan]), [0.0], torch.tensor([True, False])).counts == (0, 1)
    with pytest.raises(MetricError, match="NaN"):
        Histogram.of([math.nan], [0.0])
    with pytest.raises(MetricError, match="do not ascend"):
        Histogram.of([1.0], [1.0, 1.0])
    with pytest.raises(MetricError, match="2 counts for 2 edges"):
        Histogram((0.0, 1.0), (1, 2))


def test_without_a_process_group_metrics_are_this_process_alone():
    assert all_reduce_metrics({"a": Mean(3.0, 2), "b": 4}) == {"a": 1.5, "b": 4.0}


def global_norm(rank, world_size):
    """A rank without gradients still joins: adapter parameters live on rank 0 only."""
    parameter = torch.zeros(2)
    gradient = torch.tensor([3.0, 4.0]) if rank == 0 else None
    mine = {} if gradient is None else {"squares": Sum(float(gradient.square().sum()))}
    norm = math.sqrt(all_reduce_metrics(mine).get("squares", 0.0))
    if gradient is not None:
        parameter = gradient * min(1.0, 1.0 / norm)
    return norm, parameter.tolist()


def test_a_global_norm_includes_ranks_without_gradients():
    (norm, clipped), (other_norm, _) = run_ranks(global_norm, 2)
    assert norm == other_norm == 5.0
    assert clipped == pytest.approx([0.6, 0.8])


def score_share(rank, world_size, items, batch):
    right = all_reduce_metrics({})  # a rank may have nothing to say yet
    assert right == {}
    mine = range(rank, items, world_size)
    correct = [float(item != 1318) for item in mine]
    means = [Mean.of(correct[start : start + batch]) for start in range(0, len(correct), batch)]
    total = Mean(sum(m.total for m in means), sum(m.count for m in means))
    return all_reduce_metrics({"accuracy": total, "items": Sum(total.count)})


def test_each_item_of_an_evaluation_counts_once():
    for result in run_ranks(score_share, 8, 1319, 64):
        assert result == {"accuracy": pytest.approx(1318 / 1319, abs=1e-12), "items": 1319.0}


def test_random_numbers_of_the_caller_are_left_alone():
    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state()
    run_ranks(reduce, 2, [{}, {}])
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
