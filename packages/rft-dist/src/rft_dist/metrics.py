"""Metrics with the counts that they are means of, and their reduction over ranks in one collective."""

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from rft_dist.agreement import packed_error, raise_from
from rft_dist.errors import MetricError
from rft_dist.exchange import gather_pages


@dataclass(frozen=True)
class Mean:
    """A mean that knows what it is a mean of: total / count, summed over ranks before the division.

    Attributes:
        total: sum of the values.
        count: number (or summed weight) of the values: tokens for a token mean, samples for a sample mean.
    """

    total: float
    count: float

    @classmethod
    def of(cls, values: torch.Tensor | Sequence[float], mask: torch.Tensor | None = None) -> Self:
        """Sums in fp64.

        Args:
            values: any shape; numbers for a sequence.
            mask: same shape; True or a weight where the value counts. What is masked out may even be NaN.
        """
        if not isinstance(values, torch.Tensor):
            values = torch.tensor(values, dtype=torch.float64)
        numbers = values.detach().to(torch.float64)
        if mask is None:
            return cls(float(numbers.sum()), numbers.numel())
        if mask.shape != values.shape:
            raise MetricError(
                f"mask {tuple(mask.shape)} and values {tuple(values.shape)} differ in shape: give one mask per value"
            )
        weights = mask.detach().to(numbers)
        total = torch.where(weights != 0, numbers * weights, 0.0).sum()
        summed, count = torch.stack([total, weights.sum()]).tolist()
        return cls(summed, count)


@dataclass(frozen=True)
class Sum:
    """A sum over all ranks."""

    value: float


@dataclass(frozen=True)
class Max:
    """A maximum over all ranks."""

    value: float


@dataclass(frozen=True)
class Min:
    """A minimum over all ranks."""

    value: float


@dataclass(frozen=True)
class Histogram:
    """Counts of values between edges, added over ranks.

    Attributes:
        edges: ascending numbers e0 < e1 < ... < en.
        counts: n + 2 counts: below e0, then [e0, e1), [e1, e2), ..., then from en up.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.edges or any(not low < high for low, high in zip(self.edges, self.edges[1:], strict=False)):
            raise MetricError(f"edges={self.edges} do not ascend: give at least one, each above the one before")
        if len(self.counts) != len(self.edges) + 1:
            raise MetricError(f"{len(self.counts)} counts for {len(self.edges)} edges: give {len(self.edges) + 1}")

    @classmethod
    def of(
        cls, values: torch.Tensor | Sequence[float], edges: Sequence[float], mask: torch.Tensor | None = None
    ) -> Self:
        """Counts values between edges.

        Args:
            values: any shape.
            edges: ascending numbers, the same on every rank.
            mask: same shape as values; True where the value counts.

        Raises:
            MetricError: edges do not ascend, shapes differ, or a counted value is NaN.
        """
        numbers = torch.as_tensor(values).detach().to(torch.float64)
        if mask is not None:
            if mask.shape != numbers.shape:
                raise MetricError(f"mask {tuple(mask.shape)} and values {tuple(numbers.shape)} differ in shape")
            numbers = numbers[mask.to(torch.bool)]
        if bool(numbers.isnan().any()):
            raise MetricError("a value is NaN, which lies between no edges: mask it out")
        bounds = torch.tensor(list(edges), dtype=torch.float64, device=numbers.device)
        bins = torch.bucketize(numbers.reshape(-1), bounds, right=True)
        counts = torch.bincount(bins, minlength=len(edges) + 1)
        return cls(tuple(float(edge) for edge in edges), tuple(counts.tolist()))


Metric = float | Mean | Sum | Max | Min | Histogram


def all_reduce_metrics(
    metrics: Mapping[str, Metric], group: dist.ProcessGroup | None = None
) -> dict[str, float | Histogram]:
    """Every metric reduced over the ranks of the group. Collective over the group: one, for any number of keys.

    Ranks may hold different keys, or none: a key counts for the ranks that hold it. Each rank merges what all ranks
    sent in the order of the ranks and in fp64, so that the results are the same numbers everywhere.

    Args:
        metrics: a plain number is the mean of one sample.
        group: None means the default group, or this process alone without one.

    Returns:
        Keys in sorted order. Means whose counts add up to 0 are NaN.

    Raises:
        MetricError: (a ValueError) a value that is no metric, or one key with two kinds or two sets of edges; on every
            rank.
    """
    error: MetricError | None = None
    try:
        payload = b"\0" + pickle.dumps({key: _metric(key, value) for key, value in metrics.items()})
    except MetricError as failure:
        error, payload = failure, b"\1" + packed_error(failure)
    pieces = gather_pages(payload, group)
    for position, piece in enumerate(pieces):
        if piece[0]:
            raise_from(position, piece[1:], error, group)
    everyone: dict[str, list[Any]] = {}
    for piece in pieces:
        for key, value in pickle.loads(piece[1:]).items():
            everyone.setdefault(key, []).append(value)
    return {key: _merged(key, everyone[key]) for key in sorted(everyone)}


def _metric(key: Any, value: Any) -> Metric:
    if not isinstance(key, str):
        raise MetricError(f"metric name {key!r} is no text: name metrics by text")
    if isinstance(value, Mean | Sum | Max | Min | Histogram):
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise MetricError(f"metric {key!r} is a tensor {tuple(value.shape)}: wrap it in Mean.of(tensor, mask)")
        value = value.item()
    try:
        return Mean(float(value), 1)
    except (TypeError, ValueError):
        raise MetricError(f"metric {key!r} is {value!r}: give a number, or Mean, Sum, Max, Min or Histogram") from None


def _merged(key: str, values: list[Any]) -> float | Histogram:
    kinds = sorted({type(value).__name__ for value in values})
    if len(kinds) > 1:
        raise MetricError(f"metric {key!r} is {' on one rank and '.join(kinds)} on another: use one kind for one name")
    first = values[0]
    if isinstance(first, Mean):
        count = math.fsum(value.count for value in values)
        return math.fsum(value.total for value in values) / count if count else math.nan
    if isinstance(first, Sum):
        return math.fsum(value.value for value in values)
    if isinstance(first, Histogram):
        if any(value.edges != first.edges for value in values):
            raise MetricError(f"metric {key!r} has other edges on another rank: use the same edges everywhere")
        return Histogram(first.edges, tuple(map(sum, zip(*(value.counts for value in values), strict=True))))
    extreme = max if isinstance(first, Max) else min
    return _extreme(extreme, [value.value for value in values])


def _extreme(extreme: Any, values: list[float]) -> float:
    """NaN wins over every number, wherever it stands: a hidden NaN would depend on the order of the ranks."""
    return math.nan if any(math.isnan(value) for value in values) else float(extreme(values))
