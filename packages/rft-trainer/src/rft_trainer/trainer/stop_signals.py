"""Ctrl-C and a scheduler's SIGTERM ask a run to end after its step; a second one ends it at once."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SAME_SIGNAL_SECONDS = 1.0
"""A terminal sends Ctrl-C to every process and torchrun hands it on once more: within this time it is one signal."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While the context lasts, the first signal is noted in `requested` and the next one has its usual effect.

    In a thread that is not the main one, where Python allows no handlers, nothing changes.

    Args:
        say: told about the first signal, in words for a person.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._noted: float | None = None
        self._usual: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """A signal has come."""
        return self._noted is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._usual = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._noted is None:
            self._noted = now
            self._say(f"{signal.Signals(number).name}: the run ends after this step; once more ends it at once")
        elif now - self._noted > SAME_SIGNAL_SECONDS:
            self._restore()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        while self._usual:
            signal.signal(*self._usual.popitem())
