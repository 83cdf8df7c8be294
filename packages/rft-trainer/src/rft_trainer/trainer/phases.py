"""Seconds by phase of one step."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class PhaseClock:
    """Adds wall-clock seconds to named phases; `show` may wrap each phase with a progress display.

    On a GPU each phase ends with a device synchronisation, so that its seconds are its own.
    """

    def __init__(
        self, device: torch.device, show: Callable[[str], AbstractContextManager[object]] | None = None
    ) -> None:
        self._device = device
        self._show = show or (lambda name: nullcontext())
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        start = time.perf_counter()
        with self._show(name):
            yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def restart(self) -> None:
        """Begin a new step."""
        self._seconds = {}
        self._started = time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since `restart`, `other` for what no phase covers, `step` for all."""
        step = time.perf_counter() - self._started
        return {**self._seconds, "other": step - sum(self._seconds.values()), "step": step}
