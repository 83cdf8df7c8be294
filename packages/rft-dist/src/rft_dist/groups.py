"""The process groups of rollouts: one per axis for device tensors, and its gloo twin for objects."""

from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from rft_dist.config import check_seconds
from rft_dist.errors import ConfigurationError, GroupError
from rft_dist.exchange import gather_rows, group_device, group_ranks
from rft_dist.layout import ParallelLayout


@dataclass(frozen=True)
class RolloutGroups:
    """This rank's TP and DP group, each for device tensors and as a gloo twin for CPU tensors and objects.

    A context manager; leaving it closes the groups.

    Attributes:
        layout: with this rank filled in.
        tp: ranks that share one engine.
        tp_cpu: the same ranks, gloo.
        dp: ranks at the same position of every engine.
        dp_cpu: the same ranks, gloo.
    """

    layout: ParallelLayout
    tp: dist.ProcessGroup
    tp_cpu: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cpu: dist.ProcessGroup

    @property
    def tp_ranks(self) -> list[int]:
        """World ranks of this rank's TP group."""
        return self.layout.tp_groups()[self.layout.dp_rank]

    @property
    def dp_ranks(self) -> list[int]:
        """World ranks of this rank's DP group."""
        return self.layout.dp_groups()[self.layout.tp_rank]

    def close(self) -> None:
        """Takes the groups down; further calls do nothing. Every rank calls it, after its last use of them."""
        for group in (self.dp_cpu, self.dp, self.tp_cpu, self.tp):
            _destroy(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def build_rollout_groups(layout: ParallelLayout, *, timeout_seconds: float = 1800.0) -> RolloutGroups:
    """Makes and tests the groups of the layout. Collective over the world.

    Every rank makes every group, in the same order: TP groups, their twins, DP groups, their twins. Each of this rank's
    four groups then adds its members' numbers once, so that a broken connection shows here and not in the first step.

    Args:
        layout: the same on every rank, apart from `rank`, which is filled in where it is None.
        timeout_seconds: of each collective of these groups.

    Raises:
        ConfigurationError: (a ValueError) the layout is not that of this process or differs between ranks.
        GroupError: there is no default group, or a group's self-test gave a wrong sum.
    """
    check_seconds("timeout_seconds", timeout_seconds)
    layout = _agreed(layout)
    rank = dist.get_rank()
    timeout = timedelta(seconds=timeout_seconds)
    made: list[dist.ProcessGroup] = []
    try:
        for members in (layout.tp_groups(), layout.dp_groups()):
            made.append(_own_group(members, None, timeout, rank))
            made.append(_own_group(members, "gloo", timeout, rank))
        for group in made:
            _self_test(group)
    except BaseException:
        for group in reversed(made):
            _destroy(group)
        raise
    return RolloutGroups(layout, *made)


def _agreed(layout: ParallelLayout) -> ParallelLayout:
    """The layout with this rank, after all ranks have shown that theirs is the same. Collective over the world."""
    if not dist.is_initialized():
        raise GroupError("there is no default process group: call build_rollout_groups inside distributed_session()")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    fits = layout.world_size == world_size and layout.rank in (None, rank)
    rows = gather_rows(
        [layout.world_size, layout.engine_tp_size, -1 if layout.rank is None else layout.rank, int(fits)], None
    )
    for position, row in enumerate(rows):
        if not row[3]:
            raise ConfigurationError(
                f"the layout on rank {position} has world_size={row[0]} and rank={'None' if row[2] < 0 else row[2]}, "
                f"but the process is rank {position} of {world_size}: build ParallelLayout with the session's numbers"
            )
        if row[1] != rows[0][1]:
            raise ConfigurationError(
                f"engine_tp_size={row[1]} on rank {position} and {rows[0][1]} on rank 0: give all ranks the same"
            )
    return replace(layout, rank=rank)


def _own_group(members: list[list[int]], backend: str | None, timeout: timedelta, rank: int) -> dist.ProcessGroup:
    """Makes one group for each list of ranks and returns this rank's. Collective over the world."""
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks, backend=backend, timeout=timeout) for ranks in members]
    return next(group for group, ranks in zip(groups, members, strict=True) if rank in ranks)


def _self_test(group: dist.ProcessGroup) -> None:
    """Adds up the members' numbers. Collective over the group."""
    ranks = group_ranks(group)
    total = torch.tensor([dist.get_rank() + 1], dtype=torch.int64, device=group_device(group))
    dist.all_reduce(total, group=group)
    wanted = sum(ranks) + len(ranks)
    if int(total) != wanted:
        raise GroupError(
            f"self-test of the group {ranks} ({dist.get_backend(group)}): its ranks' numbers add up to {int(total)}, "
            f"not {wanted}; check that all ranks made the same groups in the same order"
        )


def _destroy(group: dist.ProcessGroup) -> None:
    # A group is gone already when the default group was destroyed before it.
    if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
