"""The order of the data: one seeded order for all ranks, from which each takes its share; resumable at any step."""

import random
from collections.abc import Iterator
from typing import Any, TypedDict

from rft_trainer.errors import ConfigurationError

POSITION = ("epoch", "step_in_epoch")  # the rest of the state are settings


class SamplerState(TypedDict):
    """Everything that decides the next batch. The number of ranks is not part of it and may change on resume."""

    size: int
    batch_size: int
    seed: int
    shuffle: bool
    drop_last: bool
    epoch: int
    step_in_epoch: int


class DataSampler:
    """Hands each data rank its indices of every global batch, epoch after epoch.

    The global order depends on (seed, epoch) alone, so the batches are the same for every number of ranks. A batch is
    cut into contiguous shares whose sizes differ by one at most; in a last batch smaller than the number of ranks some
    shares are empty, and those ranks take part in the step with nothing.

    Args:
        size: number of prompts.
        batch_size: prompts of one step over all ranks.
        rank: this rank among `num_ranks` data ranks.
        num_ranks: data ranks.
        seed: of the order.
        shuffle: a new order each epoch; otherwise the order of the data.
        drop_last: leave out a last batch that is not full, instead of giving a smaller one.

    Raises:
        ConfigurationError: a number is out of range, a full batch cannot be shared evenly, or no batch would be left.
    """

    def __init__(
        self,
        size: int,
        *,
        batch_size: int,
        rank: int = 0,
        num_ranks: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if size < 1 or batch_size < 1:
            raise ConfigurationError(f"size is {size} and batch_size is {batch_size}; both must be 1 or more")
        if not 0 <= rank < num_ranks:
            raise ConfigurationError(f"rank is {rank}, outside 0..{num_ranks - 1}")
        if batch_size % num_ranks:
            raise ConfigurationError(
                f"batch_size {batch_size} cannot be shared by {num_ranks} data ranks; make it a multiple of {num_ranks}"
            )
        if drop_last and size < batch_size:
            raise ConfigurationError(
                f"{size} prompts do not fill one batch of {batch_size} and drop_last leaves none; lower batch_size to "
                f"{size} or keep the last batch"
            )
        self._size, self._batch_size, self._seed = size, batch_size, seed
        self._rank, self._num_ranks = rank, num_ranks
        self._shuffle, self._drop_last = shuffle, drop_last
        self._epoch, self._step_in_epoch = 0, 0
        self._order = self._order_of(0)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of one epoch, the smaller last one included unless it is dropped."""
        full, rest = divmod(self._size, self._batch_size)
        return full + (1 if rest and not self._drop_last else 0)

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""
        return self._epoch

    def next_batch(self) -> list[int]:
        """This rank's indices of the next global batch; after the last batch of an epoch the next epoch begins."""
        start = self._step_in_epoch * self._batch_size
        batch = self._order[start : start + self._batch_size]
        self._step_in_epoch += 1
        if self._step_in_epoch == self.steps_per_epoch:
            self._epoch, self._step_in_epoch = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        return batch[self._cut(len(batch), self._rank) : self._cut(len(batch), self._rank + 1)]

    def epoch_batches(self) -> Iterator[list[int]]:
        """This rank's batches up to the end of the running epoch."""
        epoch = self._epoch
        while self._epoch == epoch:
            yield self.next_batch()

    def state_dict(self) -> SamplerState:
        """The state before the next batch; equal on every rank."""
        return SamplerState(
            size=self._size,
            batch_size=self._batch_size,
            seed=self._seed,
            shuffle=self._shuffle,
            drop_last=self._drop_last,
            epoch=self._epoch,
            step_in_epoch=self._step_in_epoch,
        )

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue where `state` was taken, also with another number of ranks.

        Raises:
            ConfigurationError: the state is of another data set or configuration; the message names each difference.
        """
        saved: dict[str, Any] = dict(state)
        different = [
            f"{name} was {saved.get(name)!r} and is {value!r}"
            for name, value in self.state_dict().items()
            if name not in POSITION and saved.get(name) != value
        ]
        if different:
            raise ConfigurationError(
                f"the data order cannot be resumed: {'; '.join(different)}; use the settings of the saved run"
            )
        self._epoch, self._step_in_epoch = state["epoch"], state["step_in_epoch"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self._size))
        if self._shuffle:
            random.Random(f"{self._seed} {epoch}").shuffle(order)
        return order

    def _cut(self, length: int, rank: int) -> int:
        share, rest = divmod(length, self._num_ranks)
        return rank * share + min(rank, rest)
