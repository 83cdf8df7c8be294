"""A logger that keeps the metrics of each step for a test to read."""

from collections.abc import Mapping


class KeptMetrics:
    """A `MetricLogger` whose steps stay in memory, in the order in which they were logged."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(dict(metrics))

    def close(self) -> None:
        """Nothing is held back."""
