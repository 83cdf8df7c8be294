"""Metrics of one update: sums over its micro-batches, reports of its optimiser steps.

Numbers stay on the device until the update is over: reading one earlier would make the host wait for the GPU, which
then waits for the host to launch the next micro-batch.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rft_dist import Max, Mean, Sum
from rft_trainer.algorithms import MetricMax, MetricSum
from rft_trainer.strategy.protocols import StepReport

Metric = Mean | Max | Sum | float


class MetricCollector:
    """Sums of metrics over the micro-batches of one model's update; `prefix` stands before each name."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._parts: list[tuple[str, MetricSum | MetricMax]] = []
        self._losses: list[Tensor] = []
        self._steps: list[StepReport] = []

    def add(self, metrics: Mapping[str, MetricSum | MetricMax], group: str = "") -> None:
        """Detached numbers only: nothing here may keep a graph alive between micro-batches."""
        self._parts += [(self._prefix + group + name, metric) for name, metric in metrics.items()]

    def add_loss(self, loss: Tensor) -> None:
        """This micro-batch's part of the global loss."""
        self._losses.append(loss.detach())

    def add_step(self, report: StepReport) -> None:
        """An optimiser step, taken or skipped."""
        self._steps.append(report)

    @property
    def steps(self) -> Sequence[StepReport]:
        """The optimiser steps so far."""
        return self._steps

    def metrics(self) -> dict[str, Metric]:
        """All of them, to be reduced over the ranks; the loss is the mean over the steps of the global loss."""
        named, loss = self._read()
        taken = [report for report in self._steps if not report.skipped]
        facts: dict[str, Metric] = {
            "updates": Max(float(len(taken))),
            "skipped_updates": Max(float(len(self._steps) - len(taken))),
        }
        if self._steps:
            facts["loss"] = Sum(loss / len(self._steps))
            facts["learning_rate"] = Max(self._steps[-1].learning_rate)
        if taken:
            facts["grad_norm"] = Max(sum(report.grad_norm for report in taken) / len(taken))
        return {**named, **{self._prefix + name: value for name, value in facts.items()}}

    def _read(self) -> tuple[dict[str, Metric], float]:
        """(named sums and maxima, sum of the losses) of all micro-batches, in one copy from the device."""
        held: list[Tensor] = []
        for _, metric in self._parts:
            held += [metric.value] if isinstance(metric, MetricMax) else [metric.total, metric.count]
        numbers = iter(torch.stack([*held, *self._losses]).tolist() if held or self._losses else [])
        sums: dict[str, tuple[float, float]] = {}
        most: dict[str, float] = {}
        for name, metric in self._parts:
            if isinstance(metric, MetricMax):
                most[name] = max(most.get(name, -torch.inf), next(numbers))
            else:
                total, count = sums.get(name, (0.0, 0.0))
                sums[name] = (total + next(numbers), count + next(numbers))
        named: dict[str, Metric] = {name: Mean(*pair) for name, pair in sums.items()}
        return {**named, **{name: Max(value) for name, value in most.items()}}, sum(numbers)
