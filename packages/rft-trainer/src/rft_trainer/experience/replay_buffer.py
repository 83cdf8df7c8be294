"""The rollouts of one step, given out in shuffled mini-batches over the epochs of its update."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar, runtime_checkable

from rft_trainer.errors import ConfigurationError


@runtime_checkable
class Grouped(Protocol):
    """An item that knows the prompt it answers: items with equal `group` are responses to one prompt."""

    @property
    def group(self) -> int | str:
        """Key of the prompt, unique within the buffer."""
        ...


Item = TypeVar("Item", bound=Grouped)


class ReplayBuffer(Generic[Item]):
    """Items of one step and their order; it keeps what it is given, on whatever device that is.

    Args:
        seed: of the shuffling. Ranks with the same seed, length and groups draw the same order.
        keep_groups: mini-batches hold whole groups.
        group_size: responses of one group; a prompt that was drawn twice in a step makes two. None: all of a prompt's.
        shuffle: False keeps the order of insertion in every epoch.
    """

    def __init__(
        self, *, seed: int = 0, keep_groups: bool = False, group_size: int | None = None, shuffle: bool = True
    ) -> None:
        self._seed = seed
        self._keep_groups = keep_groups
        self._group_size = group_size
        self._shuffle = shuffle
        self._items: list[Item] = []
        self._round = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def extend(self, items: Iterable[Item]) -> None:
        """Add items behind those that are there."""
        self._items.extend(items)

    def clear(self) -> None:
        """Drop all items; the next step shuffles differently."""
        self._items.clear()
        self._round += 1

    def release(self) -> None:
        """Let the items go; what the next step shuffles stays as it was."""
        self._items.clear()

    def mini_batches(self, size: int, epochs: int = 1) -> Iterator[list[Item]]:
        """Mini-batches of at most `size` items, each item once per epoch, reshuffled every epoch.

        The last batch of an epoch may be smaller; nothing is dropped. With `keep_groups` a batch is closed before the
        group that would overfill it.

        Raises:
            ConfigurationError: size or epochs below 1, or a group larger than `size`.
        """
        if size < 1 or epochs < 1:
            raise ConfigurationError(f"mini-batch size and epochs must be at least 1, got size {size}, epochs {epochs}")
        units = self._units()
        largest = max((len(unit) for unit in units), default=0)
        if largest > size:
            raise ConfigurationError(
                f"a group of {largest} responses does not fit into mini-batches of {size}; raise the size to "
                "a multiple of the group, or switch keep_groups off"
            )
        return self._draw(units, size, epochs)

    def state_dict(self) -> dict[str, int]:
        """What the next shuffle depends on, besides the items."""
        return {"seed": self._seed, "round": self._round}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore what `state_dict` gave."""
        self._seed, self._round = state["seed"], state["round"]

    def _draw(self, units: list[list[Item]], size: int, epochs: int) -> Iterator[list[Item]]:
        for epoch in range(epochs):
            order = list(units)
            if self._shuffle:
                random.Random(f"{self._seed}/{self._round}/{epoch}").shuffle(order)
            batch: list[Item] = []
            for unit in order:
                if len(batch) + len(unit) > size:
                    yield batch
                    batch = []
                batch = batch + unit
            if batch:
                yield batch

    def _units(self) -> list[list[Item]]:
        if not self._keep_groups:
            return [[item] for item in self._items]
        groups: dict[int | str, list[Item]] = {}
        for item in self._items:
            groups.setdefault(item.group, []).append(item)
        return [
            items[start : start + (self._group_size or len(items))]
            for items in groups.values()
            for start in range(0, len(items), self._group_size or len(items))
        ]
