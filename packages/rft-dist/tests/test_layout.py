import dataclasses

import pytest
import torch

from rft_dist import ParallelLayout

TABLE = {
    (8, 1): ([[r] for r in range(8)], [list(range(8))]),
    (8, 2): ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]),
    (8, 4): ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]),
    (8, 8): ([list(range(8))], [[r] for r in range(8)]),
    (6, 3): ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]),
    (1, 1): ([[0]], [[0]]),
}


@pytest.mark.parametrize(("sizes", "groups"), TABLE.items())
def test_tp_groups_are_consecutive_and_dp_groups_strided(sizes, groups):
    layout = ParallelLayout(*sizes)
    assert (layout.tp_groups(), layout.dp_groups()) == groups


@pytest.mark.parametrize("sizes", TABLE)
def test_ranks_point_into_the_groups(sizes):
    for rank in range(sizes[0]):
        layout = ParallelLayout(*sizes, rank=rank)
        assert layout.tp_groups()[layout.dp_rank][layout.tp_rank] == rank
        assert layout.dp_groups()[layout.tp_rank][layout.dp_rank] == rank
        assert layout.dp_size == len(layout.tp_groups())


@pytest.mark.parametrize(("base", "first"), [(7, 7), (None, 0), (0, 0)])
def test_seeds_are_equal_inside_a_tp_group_and_differ_between_groups(base, first):
    seeds = [ParallelLayout(4, 2, rank=rank).engine_seed(base) for rank in range(4)]
    assert seeds == [first, first, first + 1, first + 1]
    samples = [torch.randint(0, 10**9, (8,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in seeds]
    assert samples[0] == samples[1]
    assert samples[2] == samples[3]
    assert samples[0] != samples[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"world_size": 8, "engine_tp_size": 3},
            r"engine_tp_size=3 does not divide world_size=8: choose one of \[1, 2, 4, 8\]",
        ),
        ({"world_size": 0}, "world_size=0"),
        ({"world_size": 8, "engine_tp_size": 0}, "engine_tp_size=0"),
        ({"world_size": 8, "engine_tp_size": 2.0}, r"engine_tp_size=2\.0"),
        ({"world_size": 8, "rank": 8}, "rank=8 is outside the world: give 0 to 7"),
        ({"world_size": 8, "rank": -1}, "rank=-1"),
        (
            {"world_size": 12, "engine_tp_size": 4, "local_world_size": 6},
            "engine_tp_size=4 does not divide local_world_size=6",
        ),
        ({"world_size": 16, "engine_tp_size": 16, "local_world_size": 8}, "engine_tp_size=16 .*local_world_size=8"),
        ({"world_size": 8, "local_world_size": 3}, "local_world_size=3 does not divide world_size=8"),
    ],
)
def test_what_cannot_work_is_refused_with_the_numbers(arguments, message):
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**arguments)


def test_tp_may_span_nodes_only_in_whole_groups():
    assert ParallelLayout(16, 4, local_world_size=8).dp_size == 4
    assert ParallelLayout(8, 8, local_world_size=8).dp_size == 1


@pytest.mark.parametrize("name", ["tp_rank", "dp_rank"])
def test_a_layout_without_a_rank_says_what_it_needs(name):
    with pytest.raises(ValueError, match=rf"{name} needs a rank: build ParallelLayout\(\.\.\., rank="):
        getattr(ParallelLayout(4, 2), name)


def test_a_layout_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelLayout(4, 2).rank = 1
