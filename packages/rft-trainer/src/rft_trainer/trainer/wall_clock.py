"""A limit on the seconds of a whole run, evaluation at its end included."""

import time
from typing import Literal


class WallClockGuard:
    """Says when a further round would not fit any more.

    A round is expected to take as long as the longest so far, and the evaluation at the end as long as the longest so
    far. Nothing here communicates: whoever asks agrees on the answer with the other ranks.

    Args:
        seconds: the limit; None: there is none.
        started: `time.perf_counter()` at the start of the run; None: now.
    """

    def __init__(self, seconds: float | None, *, started: float | None = None) -> None:
        self._seconds = seconds
        self._started = time.perf_counter() if started is None else started
        self._longest = {"step": 0.0, "evaluation": 0.0}

    def note(self, kind: Literal["step", "evaluation"], seconds: float) -> None:
        """One of them has ended after so many seconds."""
        self._longest[kind] = max(self._longest[kind], seconds)

    def is_over(self) -> bool:
        """Whether one more round and the evaluation would end behind the limit."""
        if self._seconds is None:
            return False
        elapsed = time.perf_counter() - self._started
        return elapsed + sum(self._longest.values()) > self._seconds
