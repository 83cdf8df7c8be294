"""Several data sets drawn from by weight: a fixed order for all ranks, resumable at any step."""

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, overload

from rft_trainer.data.prompts import EncodedPrompt
from rft_trainer.errors import ConfigurationError


class Sampler(Protocol):
    """Hands each data rank its share of one global batch after another."""

    def next_batch(self) -> list[int]:
        """This rank's indices of the next global batch."""

    def state_dict(self) -> Mapping[str, Any]:
        """What decides the next batch; equal on every rank and for every number of them."""

    def load_state_dict(self, state: Any) -> None:
        """Continue where a state was taken."""


class BlendedDataset(Sequence[EncodedPrompt]):
    """Prompts of several sets, one set behind the other.

    Args:
        sets: by name.
        weights: of each set, above 0; a set's share of the draws is its weight over the sum.
    """

    def __init__(self, sets: Mapping[str, Sequence[EncodedPrompt]], weights: Sequence[float]) -> None:
        if not sets or len(weights) != len(sets) or min(weights) <= 0:
            raise ConfigurationError(f"{len(sets)} data sets have the weights {list(weights)}: give each one above 0")
        self.names = tuple(sets)
        self.sizes = tuple(len(prompts) for prompts in sets.values())
        self.weights = tuple(weights)
        self._prompts = [prompt for prompts in sets.values() for prompt in prompts]

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> EncodedPrompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[EncodedPrompt]: ...

    def __getitem__(self, index: int | slice) -> EncodedPrompt | list[EncodedPrompt]:
        return self._prompts[index]


class BlendSampler:
    """Draws prompts of several sets, each in a shuffled order of its own, epoch after epoch.

    The next prompt comes from the set that is furthest behind its share, so the draws follow the weights from the
    first batch on, and their order depends on the seed alone, not on the number of ranks.

    Args:
        sizes: prompts of each set; indices count through all of them.
        weights: of each set.
        batch_size: prompts of a batch over all ranks.
        rank, num_ranks: whose share is handed out; the ranks must divide the batch.
        seed: of the orders.

    Raises:
        ConfigurationError: an empty set, or ranks that do not divide the batch.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        batch_size: int,
        rank: int = 0,
        num_ranks: int = 1,
        seed: int = 0,
    ) -> None:
        if min(sizes) < 1 or len(sizes) != len(weights):
            raise ConfigurationError(f"sets of {list(sizes)} prompts with weights {list(weights)}: none may be empty")
        if batch_size % num_ranks:
            raise ConfigurationError(
                f"batch_size {batch_size} cannot be shared by {num_ranks} data ranks; make it a multiple of {num_ranks}"
            )
        self._sizes = list(sizes)
        self._shares = [weight / sum(weights) for weight in weights]
        self._starts = [0, *accumulate(sizes)][: len(sizes)]
        self._batch_size, self._seed = batch_size, seed
        self._rank, self._share = rank, batch_size // num_ranks
        self._drawn = [0] * len(sizes)
        self._orders: dict[int, tuple[int, list[int]]] = {}

    def next_batch(self) -> list[int]:
        """This rank's indices of the next global batch."""
        batch = [self._draw() for _ in range(self._batch_size)]
        return batch[self._rank * self._share : (self._rank + 1) * self._share]

    def state_dict(self) -> dict[str, Any]:
        """Settings, and prompts drawn from each set so far."""
        return {**self._settings(), "drawn": list(self._drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, also with another number of ranks.

        Raises:
            ConfigurationError: the state is of other sets or settings; the message names each difference.
        """
        different = [
            f"{name} was {state.get(name)!r} and is {value!r}"
            for name, value in self._settings().items()
            if state.get(name) != value
        ]
        if different:
            raise ConfigurationError(
                f"the data order cannot be resumed: {'; '.join(different)}; use the settings of the saved run"
            )
        self._drawn = list(state["drawn"])

    def _settings(self) -> dict[str, Any]:
        return {
            "sizes": self._sizes,
            "shares": self._shares,
            "batch_size": self._batch_size,
            "seed": self._seed,
        }

    def _draw(self) -> int:
        total = sum(self._drawn) + 1
        behind = [share * total - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
        chosen = behind.index(max(behind))
        epoch, position = divmod(self._drawn[chosen], self._sizes[chosen])
        self._drawn[chosen] += 1
        return self._starts[chosen] + self._order(chosen, epoch)[position]

    def _order(self, chosen: int, epoch: int) -> list[int]:
        if self._orders.get(chosen, (-1, []))[0] != epoch:
            order = list(range(self._sizes[chosen]))
            random.Random(f"{self._seed} {chosen} {epoch}").shuffle(order)
            self._orders[chosen] = (epoch, order)
        return self._orders[chosen][1]
