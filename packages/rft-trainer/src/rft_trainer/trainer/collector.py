"""Metrics of one update: sums over its micro-batches, reports of its optimiser steps."""

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
        self._sums: dict[str, tuple[float, float]] = {}
        self._most: dict[str, float] = {}
        self._loss = 0.0
        self._steps: list[StepReport] = []

    def add(self, metrics: Mapping[str, MetricSum | MetricMax], group: str = "") -> None:
        """Detached numbers only: nothing here may keep a graph alive between micro-batches."""
        for name, metric in metrics.items():
            key = self._prefix + group + name
            if isinstance(metric, MetricMax):
                self._most[key] = max(self._most.get(key, -torch.inf), float(metric.value))
            else:
                total, count = self._sums.get(key, (0.0, 0.0))
                self._sums[key] = (total + float(metric.total), count + float(metric.count))

    def add_loss(self, loss: Tensor) -> None:
        """This micro-batch's part of the global loss."""
        self._loss += float(loss.detach())

    def add_step(self, report: StepReport) -> None:
        """An optimiser step, taken or skipped."""
        self._steps.append(report)

    @property
    def steps(self) -> Sequence[StepReport]:
        """The optimiser steps so far."""
        return self._steps

    def metrics(self) -> dict[str, Metric]:
        """All of them, to be reduced over the ranks; the loss is the mean over the steps of the global loss."""
        named: dict[str, Metric] = {name: Mean(*pair) for name, pair in self._sums.items()}
        named.update({name: Max(value) for name, value in self._most.items()})
        taken = [report for report in self._steps if not report.skipped]
        facts: dict[str, Metric] = {
            "updates": Max(float(len(taken))),
            "skipped_updates": Max(float(len(self._steps) - len(taken))),
        }
        if self._steps:
            facts["loss"] = Sum(self._loss / len(self._steps))
            facts["learning_rate"] = Max(self._steps[-1].learning_rate)
        if taken:
            facts["grad_norm"] = Max(sum(report.grad_norm for report in taken) / len(taken))
        return {**named, **{self._prefix + name: value for name, value in facts.items()}}
