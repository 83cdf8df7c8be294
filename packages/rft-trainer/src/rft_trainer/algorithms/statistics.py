"""Masked means, mergeable moments and whitening.

Masks are [N, T] tensors, bool or 0/1; they may have holes. Nothing here talks to other ranks: a number over all ranks
is made by the caller, who sums `Moments.sums` (or a `MetricSum`) over the ranks and passes the result back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class MetricSum:
    """A mean in two halves, so that means over ranks and micro-batches weigh every token once.

    Both are detached fp32 scalars; the value to log is the sum of totals over the sum of counts.
    """

    total: Tensor
    count: Tensor

    @property
    def mean(self) -> float:
        """total / count, 0.0 where nothing was counted."""
        count = float(self.count)
        return float(self.total) / count if count else 0.0


@dataclass(frozen=True)
class MetricMax:
    """A maximum, combined over ranks and micro-batches by a maximum. `value` is a detached fp32 scalar."""

    value: Tensor


def require_same_shape(**tensors: Tensor | None) -> None:
    """Raise ValueError naming every shape unless all given tensors have one shape; None is skipped."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"tensors must have one shape, got {listed}; cut or pad them to the same rows and columns")


def keep_masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is set, exactly 0 elsewhere (value and gradient), even where `values` is not finite."""
    require_same_shape(values=values, mask=mask)
    return torch.where(mask.bool(), values, torch.zeros_like(values))


def masked_mean(values: Tensor, mask: Tensor, denominator: Tensor | float | None = None) -> Tensor:
    """Sum of the unmasked values over `denominator`, a scalar.

    Args:
        values: [..., T].
        mask: same shape, bool or 0/1.
        denominator: what to divide by; None means the number of unmasked cells. Give the global count to make the
            sum over ranks and micro-batches the global mean.

    Returns:
        Scalar; 0.0 (with a gradient of zeros) when the denominator is 0.
    """
    total = keep_masked(values, mask).sum()
    if isinstance(denominator, float | int):
        return total / (denominator or 1.0)
    count = mask.bool().sum() if denominator is None else denominator.to(values.device)
    return total / torch.where(count == 0, torch.ones_like(count), count)


def metric_mean(values: Tensor, mask: Tensor) -> MetricSum:
    """The unmasked sum and count of `values`, detached."""
    kept = keep_masked(values.detach().float(), mask)
    return MetricSum(kept.sum(), mask.bool().sum().float())


def metric_max(values: Tensor, mask: Tensor) -> MetricMax:
    """The largest unmasked value of a tensor of values >= 0, detached; 0 without any."""
    kept = keep_masked(values.detach().float(), mask)
    return MetricMax(kept.max() if kept.numel() else kept.sum())


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of some values: adds up over ranks.

    Attributes:
        sums: [3] float64 tensor (count, sum, sum of squares). All-reduce it with SUM and wrap the result in `Moments`
            to have the moments over all ranks. A rank without a single value holds zeros and still joins.
    """

    sums: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor | None = None) -> Moments:
        """Moments of the unmasked values (all values when `mask` is None)."""
        flat = values.detach().double() if mask is None else keep_masked(values.detach().double(), mask)
        count = torch.tensor(values.numel(), device=values.device) if mask is None else mask.bool().sum()
        return cls(torch.stack([count.double(), flat.sum(), flat.square().sum()]))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.sums + other.sums)

    @property
    def count(self) -> float:
        """Number of values."""
        return float(self.sums[0])

    @property
    def mean(self) -> float:
        """Mean, 0.0 without values."""
        return float(self.sums[1]) / self.count if self.count else 0.0

    def variance(self, *, unbiased: bool = False) -> float:
        """Population variance, or the n - 1 one; 0.0 where it is not defined."""
        divisor = self.count - 1 if unbiased else self.count
        if divisor <= 0:
            return 0.0
        return max(float(self.sums[2]) - self.count * self.mean**2, 0.0) / divisor

    @property
    def has_spread(self) -> bool:
        """Whether the deviation is more than the rounding of equal fp32 values: over a millionth of their size.

        True for values that are not finite: what they spoil must show.
        """
        return not self.count * self.variance() <= 1e-12 * float(self.sums[2])

    @property
    def is_degenerate(self) -> bool:
        """True with fewer than two values: `whiten` then passes values through, which is worth counting in a metric."""
        return self.count < 2


def whiten(
    values: Tensor,
    mask: Tensor,
    *,
    moments: Moments | None = None,
    unbiased: bool = False,
    centred: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """Zero mean and unit variance over the unmasked cells; masked cells become 0.

    Args:
        values: [N, T].
        mask: [N, T].
        moments: of the whole batch over all ranks; None takes this tensor alone (right only with one rank).
        unbiased: divide the variance by n - 1 instead of n (population, the default).
        centred: False keeps the mean and only scales.
        eps: added to the variance under the root.

    Returns:
        [N, T] in the dtype of `values`. With one value in all, it is passed through unchanged; with none, zeros. Equal
        values become 0, or stay as they are when not centred: there is no deviation to divide by.
    """
    moments = Moments.of(values, mask) if moments is None else moments
    if moments.is_degenerate:
        return keep_masked(values, mask)
    if not moments.has_spread:
        return torch.zeros_like(values) if centred else keep_masked(values, mask)
    scale = (moments.variance(unbiased=unbiased) + eps) ** -0.5
    shift = moments.mean if centred else 0.0
    return keep_masked((values - shift) * scale, mask)


@dataclass
class RunningMoments:
    """Moments of all rewards seen so far, to normalise rewards over a run.

    Update once per step with the moments over all ranks, so that every rank holds the same numbers.
    """

    moments: Moments = field(default_factory=lambda: Moments(torch.zeros(3, dtype=torch.float64)))

    def update(self, batch: Moments) -> None:
        """Add one step's moments (already summed over the ranks)."""
        self.moments = Moments(self.moments.sums + batch.sums.to(self.moments.sums.device))

    def normalise(self, rewards: Tensor, *, centred: bool = True, eps: float = 1e-8) -> Tensor:
        """(r - mean) / std of everything seen, or r / std when not centred; see `whiten` for no spread."""
        return whiten(rewards, torch.ones_like(rewards), moments=self.moments, centred=centred, unbiased=True, eps=eps)

    def state_dict(self) -> dict[str, list[float]]:
        """Plain numbers for a checkpoint."""
        return {"sums": [float(entry) for entry in self.moments.sums]}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Restore what `state_dict` gave."""
        self.moments = Moments(torch.tensor(state["sums"], dtype=torch.float64))
