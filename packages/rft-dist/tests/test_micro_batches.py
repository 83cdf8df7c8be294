import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_dist import Mean, all_reduce_metrics, balanced_micro_batches
from rft_dist.micro_batches import _first_fit, _spread
from rft_dist.testing import preload, run_ranks

preload("hypothesis", "torch.distributed.fsdp", "torch._dynamo")


def cut(rank, world_size, lengths, max_tokens):
    return balanced_micro_batches(lengths[rank], max_tokens)


def test_ranks_with_short_items_run_as_many_micro_batches_as_the_others():
    first, second = run_ranks(cut, 2, [[90] * 4, [20] * 4], 100)
    assert first == [[0], [1], [2], [3]]
    assert second == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "expected"),
    [
        ([[], [30, 30]], 100, [[[]], [[0, 1]]]),
        ([[], []], 100, [[], []]),
        ([[10], [60, 60, 60]], 100, [[[0], [], []], [[0], [1], [2]]]),
        ([[250, 10], [40, 50]], 100, [[[0], [1]], [[1], [0]]]),
        ([[10, 70, 30, 60]], 100, [[[2, 3], [0, 1]]]),
    ],
)
def test_padding_is_only_where_a_rank_has_too_few_items(lengths, max_tokens, expected):
    assert run_ranks(cut, len(lengths), lengths, max_tokens) == expected


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 130), max_size=40), st.integers(20, 120), st.integers(0, 12))
def test_every_cut_keeps_the_budget_and_every_item(lengths, max_tokens, more):
    needed = len(_first_fit(lengths, max_tokens))
    bins = _spread(lengths, max_tokens, needed + more)
    assert sorted(index for indices in bins for index in indices) == list(range(len(lengths)))
    assert len(bins) == min(needed + more, len(lengths))
    for indices in bins:
        assert indices
        assert len(indices) == 1 or sum(lengths[i] for i in indices) <= max_tokens


def test_an_even_spread_that_finds_no_room_falls_back_to_first_fit():
    # Lightest-bin-first puts 5 and 4 apart, then 3 and 3 on top, and the last 3 fits nowhere under 9.
    lengths, budget = [5, 4, 3, 3, 3], 9
    assert len(_first_fit(lengths, budget)) == 2
    assert sorted(sum(lengths[i] for i in b) for b in _spread(lengths, budget, 2)) == [9, 9]


def refusal(rank, world_size, lengths, max_tokens):
    try:
        balanced_micro_batches(lengths[rank], max_tokens[rank])
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "message"),
    [
        ([[1], [5, 0]], [10, 10], r"lengths\[1\]=0 is no length"),
        ([[1], [2.5]], [10, 10], r"lengths\[0\]=2\.5 is no length"),
        ([[1], [1]], [10, 0], "max_tokens=0 is no budget"),
    ],
)
def test_a_wrong_length_on_one_rank_is_an_error_on_all(lengths, max_tokens, message):
    first, second = run_ranks(refusal, 2, lengths, max_tokens)
    assert first == second
    with pytest.raises(ValueError, match=message + ".*raised on rank 1"):
        raise ValueError(first)


def test_without_a_process_group_nothing_is_agreed():
    assert balanced_micro_batches([20] * 4, 100) == [[0, 1, 2, 3]]


def rows(rank, count, width=8):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(width, generator=generator) for _ in range(count)]


def sharded_gradient(rank, world_size, lengths, max_tokens):
    """Gradient of the mean loss over all items, with FSDP2-sharded parameters and padding micro-batches."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    for module in (*model, model):
        if list(module.parameters()):
            fully_shard(module)
    items = rows(rank, len(lengths[rank]))
    total = sum(map(len, lengths))
    batches = balanced_micro_batches(lengths[rank], max_tokens)
    for indices in batches:
        # An empty micro-batch runs a padding row with weight zero, so that its gathers pair with the others'.
        batch = torch.stack([items[i] for i in indices]) if indices else torch.zeros(1, 8)
        weight = 1.0 if indices else 0.0
        # FSDP averages gradients over ranks; the loss is a mean over the items of all of them.
        (model(batch).sum() * weight * world_size / total).backward()
    return len(batches), [parameter.grad.full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("lengths", "count"),
    [([[90] * 4, [20] * 4], 4), ([[50], [60], [70], []], 1)],
    ids=["long and short", "three items on four ranks"],
)
def test_a_sharded_gradient_with_padding_equals_the_one_of_one_rank(lengths, count):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    everything = torch.stack([row for rank, items in enumerate(lengths) for row in rows(rank, len(items))])
    model(everything).mean().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    for batches, gradient in run_ranks(sharded_gradient, len(lengths), lengths, 100):
        assert batches == count
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)


def evaluate(rank, world_size):
    """Rank 0 has three batches, rank 1 two; every forward is a collective."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    fully_shard(model)
    batches = rows(rank, 3 if rank == 0 else 2)
    scores = []
    for indices in balanced_micro_batches([1] * len(batches), 1):
        with torch.no_grad():
            out = model(torch.stack([batches[i] for i in indices]) if indices else torch.zeros(1, 8))
        scores += out.flatten().tolist() if indices else []
    return len(scores), all_reduce_metrics({"score": Mean.of(scores)})["score"], dist.get_rank()


def test_an_evaluation_with_unequal_batches_ends_and_scores_all_of_them():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    wanted = float(model(torch.stack(rows(0, 3) + rows(1, 2))).mean().detach())
    results = run_ranks(evaluate, 2)
    assert [result[0] for result in results] == [3, 2]
    assert results[0][1] == results[1][1] == pytest.approx(wanted, abs=1e-6)
