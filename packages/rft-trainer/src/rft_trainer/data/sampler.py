"""The order of items: shuffled anew each epoch, dealt over ranks, resumable to the item."""

import random
from typing import Any

from rft_trainer.errors import ConfigurationError


class DataSampler:
    """Endless global batches of `batch_size` item numbers, of which each rank gets its consecutive share.

    All ranks draw the same global order, so a global batch does not depend on the number of ranks. An epoch ends when its
    items are used up; a batch that the rest of an epoch cannot fill goes on into the next epoch, so nothing is lost or
    drawn twice within an epoch.

    Args:
        size: items.
        batch_size: items of a global batch; a multiple of `world_size`.
        rank, world_size: this rank among those that hold different data.
        seed: of the shuffling.
        shuffle: False keeps the order of the items in every epoch.

    Raises:
        ConfigurationError: no items, or a batch that the ranks do not divide.
    """

    def __init__(
        self, size: int, batch_size: int, *, rank: int = 0, world_size: int = 1, seed: int = 0, shuffle: bool = True
    ) -> None:
        if size < 1:
            raise ConfigurationError(f"a sampler needs at least one item, got {size}")
        if batch_size < 1 or batch_size % world_size:
            raise ConfigurationError(f"batch size {batch_size} must be a multiple of the {world_size} data ranks")
        self._size = size
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._shuffle = shuffle
        self._drawn = 0
        self._orders: dict[int, list[int]] = {}

    @property
    def epoch(self) -> int:
        """Epochs begun before the next item, from 0."""
        return self._drawn // self._size

    def next_batch(self) -> list[int]:
        """This rank's item numbers of the next global batch."""
        share = self._batch_size // self._world_size
        start = self._drawn + self._rank * share
        self._drawn += self._batch_size
        return [self._item(position) for position in range(start, start + share)]

    def _item(self, position: int) -> int:
        epoch, place = divmod(position, self._size)
        return self._order(epoch)[place]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(self._size))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            # A batch touches at most a few neighbouring epochs; older orders are drawn again if they are needed.
            self._orders = {known: kept for known, kept in self._orders.items() if known >= epoch - 1}
            self._orders[epoch] = order
        return self._orders[epoch]

    def state_dict(self) -> dict[str, Any]:
        """Position and everything that fixes the order."""
        return {"drawn": self._drawn, "size": self._size, "seed": self._seed, "batch_size": self._batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last drawn batch.

        Raises:
            ConfigurationError: the state belongs to other data or another seed.
        """
        mine = self.state_dict()
        differing = [name for name in ("size", "seed") if state[name] != mine[name]]
        if differing:
            raise ConfigurationError(
                f"the checkpoint's data order has {', '.join(f'{n}={state[n]}' for n in differing)}, this run has "
                f"{', '.join(f'{n}={mine[n]}' for n in differing)}: resume with the same data and seed"
            )
        self._drawn = state["drawn"]
