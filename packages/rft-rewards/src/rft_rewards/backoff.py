"""Retry with backoff and jitter, bounded in tries and in total time."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often and how long a request is tried again.

    Attributes:
        max_tries: tries of one request, the first included.
        timeout_seconds: limit of one try, from connecting to the last byte.
        budget_seconds: limit of everything one call of the reward model does, waits included.
        backoff_seconds: mean wait before the second try; it doubles with each further one.
        max_backoff_seconds: longest mean wait.
    """

    max_tries: int = 5
    timeout_seconds: float = 60.0
    budget_seconds: float = 300.0
    backoff_seconds: float = 0.5
    max_backoff_seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.max_tries < 1:
            raise ValueError(f"max_tries is {self.max_tries}: give 1 or more")
        for field in ("timeout_seconds", "budget_seconds", "backoff_seconds", "max_backoff_seconds"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is {getattr(self, field)}: give more than 0")

    def wait_seconds(self, tries: int, asked_seconds: float | None = None) -> float:
        """Wait after `tries` failed tries: uniform within half and one and a half of the mean.

        `asked_seconds`, what the server asked for (`Retry-After`), is a lower bound.
        """
        mean = min(self.max_backoff_seconds, self.backoff_seconds * 2.0 ** (tries - 1))
        return max(asked_seconds or 0.0, mean * random.uniform(0.5, 1.5))
