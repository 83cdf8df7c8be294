"""A moving average of the actor's weights, kept shard by shard beside them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rft_trainer.errors import CheckpointError
from rft_trainer.optim import MovingAverage
from rft_trainer.strategy.protocols import TrainState
from rft_trainer.strategy.residency import local_shard


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
        # The phase may have sent the actor to the host.
        self._state.memory.model.reload()
        # Whole copies that a forward left behind would hide the change.
        self._state.release_gathered()
        with self._average.applied(self._shards()):
            yield
            self._state.release_gathered()

    def tensors(self) -> Iterable[Tensor]:
        """The averages."""
        return self._average.state_dict().values()

    def put(self) -> None:
        """The averages become the actor's weights, for a process that does not train."""
        self._state.memory.model.reload()
        self._state.release_gathered()
        self._average.copy_to(self._shards())

    def save(self, folder: Path, rank: int) -> None:
        """Write this rank's averages."""
        torch.save(self._average.state_dict(), folder / _file(rank))

    def load(self, folder: Path, rank: int) -> None:
        """Read what `save` wrote.

        Raises:
            CheckpointError: there is none.
        """
        if not (folder / _file(rank)).is_file():
            raise CheckpointError(
                f"{folder} holds no moving average of rank {rank}: give --ema_decay 0 for the weights"
            )
        self._average.load_state_dict(torch.load(folder / _file(rank), weights_only=True))

    def _shards(self) -> list[tuple[str, Tensor]]:
        return [(n, local_shard(p.detach())) for n, p in self._state.network.named_parameters() if p.requires_grad]


def _file(rank: int) -> str:
    return f"average_{rank:05d}.pt"
