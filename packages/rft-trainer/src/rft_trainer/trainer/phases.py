"""Seconds by phase of one step."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

RECORD = "record"
"""The phase of all that only writes down what was: rollouts, memory, the metrics of the step."""


class PhaseMemory(Protocol):
    """What the borders between phases do to memory."""

    def enter(self, phase: str) -> None:
        """Bring what the phase needs. May be collective over the world."""

    def leave(self, phase: str) -> None:
        """The phase has ended well. No communication."""

    def begin(self, step: int) -> None:
        """The phases from here on belong to `step`. No communication."""

    def metrics(self, step: int) -> dict[str, float]:
        """This rank's figures of the step, under `memory/`. No communication."""
        ...

    def table(self) -> str:
        """What each phase held on this rank; empty without a record."""
        ...


class NoPhaseMemory:
    """Everything stays where it is."""

    def enter(self, phase: str) -> None:
        """Nothing."""

    def leave(self, phase: str) -> None:
        """Nothing."""

    def begin(self, step: int) -> None:
        """Nothing."""

    def metrics(self, step: int) -> dict[str, float]:
        """None."""
        return {}

    def table(self) -> str:
        """Empty."""
        return ""


class PhaseClock:
    """Adds wall-clock seconds to named phases; `show` may wrap each phase with a progress display.

    `enter` is called when a phase begins, inside its seconds: it brings what the phase needs. `leave` is called when
    one has ended well; its seconds are those of the phase `record`, since it notes what the phase held.

    On a GPU each phase ends with a device synchronisation, so that its seconds are its own.
    """

    def __init__(
        self,
        device: torch.device,
        show: Callable[[str], AbstractContextManager[object]] | None = None,
        *,
        enter: Callable[[str], None] = lambda name: None,
        leave: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._device = device
        self._show = show or (lambda name: nullcontext())
        self._enter = enter
        self._leave = leave
        self._seconds: dict[str, float] = {}
        self._border = 0.0
        self._started = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        start = time.perf_counter()
        with self._show(name):
            self._enter(name)
            self._border += time.perf_counter() - start
            yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        ended = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + ended - start
        self._leave(name)
        self._seconds[RECORD] = self._seconds.get(RECORD, 0.0) + time.perf_counter() - ended

    def restart(self) -> None:
        """Begin a new step."""
        self._seconds = {}
        self._border = 0.0
        self._started = time.perf_counter()

    @property
    def border_seconds(self) -> float:
        """Seconds of all phases that went into bringing what they need: moves, sleeping and waking."""
        return self._border

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since `restart`, `other` for what no phase covers, `step` for all."""
        step = time.perf_counter() - self._started
        return {**self._seconds, "other": step - sum(self._seconds.values()), "step": step}
