import dataclasses

import pytest
import torch
import torch.distributed as dist

from rft_dist import GroupError, ParallelLayout, build_rollout_groups
from rft_dist.testing import run_ranks


def sums_per_axis(rank, world_size, tp_size):
    groups_before = len(dist.distributed_c10d._world.pg_map)
    with build_rollout_groups(ParallelLayout(world_size, tp_size)) as groups:
        sums = []
        for group in (groups.tp, groups.tp_cpu, groups.dp, groups.dp_cpu):
            total = torch.tensor([1 << rank])
            dist.all_reduce(total, group=group)
            sums.append(int(total))
        backends = {dist.get_backend(group) for group in (groups.tp_cpu, groups.dp_cpu)}
        found = (groups.tp_ranks, groups.dp_ranks, dist.get_process_group_ranks(groups.tp))
        made = groups.layout
    groups.close()
    return sums, backends, found, made, len(dist.distributed_c10d._world.pg_map) - groups_before


@pytest.mark.parametrize(("world_size", "tp_size"), [(1, 1), (2, 1), (2, 2), (4, 2), (8, 2)])
def test_every_axis_has_a_group_and_a_gloo_twin_and_is_torn_down(world_size, tp_size):
    layout = ParallelLayout(world_size, tp_size)
    for rank, result in enumerate(run_ranks(sums_per_axis, world_size, tp_size)):
        sums, backends, (tp_ranks, dp_ranks, members), made, left_over = result
        assert tp_ranks == members == layout.tp_groups()[rank // tp_size]
        assert dp_ranks == layout.dp_groups()[rank % tp_size]
        tp_sum, dp_sum = sum(1 << r for r in tp_ranks), sum(1 << r for r in dp_ranks)
        assert sums == [tp_sum, tp_sum, dp_sum, dp_sum]
        assert backends == {"gloo"}
        assert made == dataclasses.replace(layout, rank=rank)
        assert left_over == 0


def unequal_layouts(rank, world_size):
    try:
        build_rollout_groups(ParallelLayout(world_size, 2 if rank == 3 else 1))
    except ValueError as error:
        return str(error)


def test_layouts_that_differ_between_ranks_are_an_error_on_all():
    results = run_ranks(unequal_layouts, 4)
    assert results == ["engine_tp_size=2 on rank 3 and 1 on rank 0: give all ranks the same"] * 4


def foreign_layout(rank, world_size, layout):
    try:
        build_rollout_groups(layout)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("layout", [ParallelLayout(4), ParallelLayout(2, rank=1)])
def test_a_layout_of_another_world_is_an_error_on_all(layout):
    first, second = run_ranks(foreign_layout, 2, layout)
    assert first == second
    assert "build ParallelLayout with the session's numbers" in first


def test_groups_need_a_default_group():
    with pytest.raises(GroupError, match=r"inside distributed_session\(\)"):
        build_rollout_groups(ParallelLayout(1))


def closed_after_the_default_group(rank, world_size):
    groups = build_rollout_groups(ParallelLayout(world_size, 2))
    dist.destroy_process_group()
    groups.close()
    return "closed"


def test_closing_after_the_default_group_is_gone_is_no_error():
    assert run_ranks(closed_after_the_default_group, 2, guard=False) == ["closed"] * 2
