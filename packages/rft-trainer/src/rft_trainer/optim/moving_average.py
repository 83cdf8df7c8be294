"""Exponential moving average of weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rft_trainer.errors import ConfigurationError


class MovingAverage:
    """fp32 averages of named tensors: average <- decay * average + (1 - decay) * value.

    Works on whatever shard of a tensor the rank holds; no communication. Averages are fp32 because (1 - decay) of a
    bf16 difference rounds to nothing.

    Args:
        named: names and tensors, such as `module.named_parameters()`; their present values are the start.
        decay: in [0, 1); 0 follows the weights.
        device: where the averages live; None keeps them beside their tensors.
    """

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], decay: float, *, device: torch.device | str | None = None
    ) -> None:
        if not 0 <= decay < 1:
            raise ConfigurationError(f"decay of the moving average must lie in [0, 1), got {decay}")
        self.decay = decay
        # clone, so that an average never shares storage with its weight
        self._averages = {
            name: tensor.detach().to(device=device or tensor.device, dtype=torch.float32, copy=True)
            for name, tensor in named
        }

    @torch.no_grad()
    def update(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take in the weights after an optimiser step."""
        for average, tensor in self._pairs(named):
            average.lerp_(tensor.detach().to(device=average.device, dtype=torch.float32), 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Write the averages into the tensors, in their dtype."""
        for average, tensor in self._pairs(named):
            tensor.copy_(average)

    @contextmanager
    def applied(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
        """The averages stand in the tensors inside the context (for evaluation or saving), the weights after it."""
        tensors = list(named)
        saved = [tensor.detach().clone() for _, tensor in tensors]
        self.copy_to(tensors)
        try:
            yield
        finally:
            with torch.no_grad():
                for (_, tensor), weight in zip(tensors, saved, strict=True):
                    tensor.copy_(weight)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by name; live tensors, not copies."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave."""
        for average, tensor in self._pairs(state.items()):
            average.copy_(tensor)

    def _pairs(self, named: Iterable[tuple[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        given = dict(named)
        if given.keys() != self._averages.keys():
            differing = sorted(given.keys() ^ self._averages.keys())
            raise ValueError(f"names differ from those averaged so far: {differing[:8]}; build a new average")
        return [(average, given[name]) for name, average in self._averages.items()]
