"""A moving average of the actor's weights, kept shard by shard beside them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rft_trainer.optim import MovingAverage
from rft_trainer.strategy.protocols import TrainState


class WeightAverage:
    """fp32 average of this rank's share of the trainable weights (FSDP2, ZeRO stages 0 to 2). No communication."""

    def __init__(self, state: TrainState, decay: float) -> None:
        self._state = state
        self._average = MovingAverage(self._shards(), decay)

    def update(self) -> None:
        """Take in the weights after an optimiser step."""
        self._average.update(self._shards())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The averages are the actor's weights inside."""
        # Whole copies that a forward left behind would hide the change.
        self._state.release_gathered()
        with self._average.applied(self._shards()):
            yield
            self._state.release_gathered()

    def save(self, folder: Path, rank: int) -> None:
        """Write this rank's averages."""
        torch.save(self._average.state_dict(), folder / _file(rank))

    def load(self, folder: Path, rank: int) -> None:
        """Read what `save` wrote."""
        self._average.load_state_dict(torch.load(folder / _file(rank), weights_only=True))

    def _shards(self) -> list[tuple[str, Tensor]]:
        return [(n, _local(p.detach())) for n, p in self._state.network.named_parameters() if p.requires_grad]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _file(rank: int) -> str:
    return f"average_{rank:05d}.pt"
