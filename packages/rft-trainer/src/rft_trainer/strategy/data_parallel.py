"""The trainer's collectives, by rft-dist."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rft_dist import all_reduce_metrics, balanced_micro_batches, raise_together, run_on_first_rank


class WorldDataParallel:
    """DataParallel over all ranks: every rank trains on its own data, whatever the engine's TP size.

    `group` is the gloo twin of the world, for numbers that are on the host anyway.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = device
        self._group = group

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks, in float64 on the host. Collective over the world."""
        total = values.detach().to("cpu", torch.float64)
        dist.all_reduce(total, group=self._group)
        return total

    def reduce_metrics(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """One fused reduction of named metrics. Collective over the world."""
        reduced = all_reduce_metrics(metrics, self._group)
        return {name: value for name, value in reduced.items() if isinstance(value, float)}

    def micro_batches(self, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Indices by micro-batch, the same number on every rank. Collective over the world."""
        return balanced_micro_batches(lengths, max_tokens, self._group)

    def most(self, value: int) -> int:
        """Largest value over the ranks. Collective over the world."""
        largest = torch.tensor(value)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return int(largest)

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The integers of each rank, however many it has. Collective over the world."""
        gathered: list[list[int]] = [[] for _ in range(self.size)]
        dist.all_gather_object(gathered, list(values), group=self._group)
        return gathered

    def on_main(self, action: Callable[[], None]) -> None:
        """Run on rank 0; its error is raised on every rank. Collective over the world."""
        run_on_first_rank(action, self._group)

    def together(self, error: BaseException | None) -> None:
        """Raise the first rank's error on all ranks. Collective over the world."""
        raise_together(error, self._group)
