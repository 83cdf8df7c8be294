"""Estimators of the divergence between two policies, and the coefficient in front of it.

With d = log p - log q for a token sampled from p (J. Schulman, "Approximating KL Divergence", 2020):
k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, abs = |d|.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rft_trainer.algorithms.statistics import keep_masked, require_same_shape
from rft_trainer.errors import ConfigurationError

_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(-d) + d,
    "abs": torch.abs,
}

KL_KINDS: tuple[str, ...] = (
    *_ESTIMATORS,
    *(f"{value}+{gradient}" for value in _ESTIMATORS for gradient in _ESTIMATORS if value != gradient),
)
"""Names that `kl_estimate` takes. "k3+k2" reads: the value of k3 with the gradient of k2."""


def check_kl_kind(kind: str) -> None:
    """Raise ConfigurationError listing the names unless `kind` is one of `KL_KINDS`."""
    if kind not in KL_KINDS:
        raise ConfigurationError(f"kl estimator {kind!r} is not known; choose one of {', '.join(KL_KINDS)}")


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str, mask: Tensor | None = None) -> Tensor:
    """Per-token estimate of KL(policy || reference) at the sampled tokens.

    Args:
        log_probs: [B, T], of the policy that sampled; carries the gradient.
        ref_log_probs: [B, T], of the reference.
        kind: one of `KL_KINDS`. A pair "a+b" is the straight-through form: the number of a, the gradient of b. The
            gradient of k2 is in the mean that of KL(policy || reference), that of k3 the one of
            KL(reference || policy), and that of k1 has mean zero (Tang and Munos, arXiv 2506.09477).
        mask: [B, T]; when given, masked cells are exactly 0.

    Returns:
        [B, T]. The exponential in k3 is not clamped: a policy 88 nats away overflows fp32 and shows as inf.

    Raises:
        ConfigurationError: unknown kind.
        ValueError: shapes differ.
    """
    check_kl_kind(kind)
    require_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs, mask=mask)
    difference = log_probs.float() - ref_log_probs.float()
    if mask is not None:
        difference = keep_masked(difference, mask)
    value_kind, _, gradient_kind = kind.partition("+")
    value = _ESTIMATORS[value_kind](difference)
    if not gradient_kind:
        return value
    carrier = _ESTIMATORS[gradient_kind](difference)
    return value.detach() + (carrier - carrier.detach())


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, kind: str = "k2") -> Tensor:
    """Per-token divergence [B, T] to add to the loss, times its coefficient; masked cells 0.

    k2 is the default because its gradient is the on-policy gradient of KL(policy || reference); GRPO (Shao et al.,
    arXiv 2402.03300, section 4.1.1) uses k3. With k1, whose gradient has mean zero, a UserWarning is given.
    """
    if kind.partition("+")[2] == "k1" or kind == "k1":
        warnings.warn(
            f"kl estimator {kind!r} as a loss has a gradient of mean zero and restrains nothing; use 'k2' or 'k3+k2'",
            stacklevel=2,
        )
    return kl_estimate(log_probs, ref_log_probs, kind, mask)


class KLController(Protocol):
    """A coefficient that may follow the observed divergence."""

    @property
    def value(self) -> float:
        """The coefficient now."""
        ...

    def update(self, observed: float, samples: int) -> None:
        """Take in the divergence of one step, already averaged over all ranks, and its number of samples."""
        ...

    def state_dict(self) -> dict[str, float]:
        """Plain numbers for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` gave."""
        ...


@dataclass
class FixedKL:
    """A coefficient that stays."""

    value: float

    def update(self, observed: float, samples: int) -> None:
        """Nothing to follow."""

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the coefficient."""
        self.value = state["value"]


@dataclass
class AdaptiveKL:
    """Proportional control of the coefficient (Ziegler et al., arXiv 1909.08593, section 2.2).

    value <- value * (1 + clip(observed / target - 1, -0.2, 0.2) * min(samples / horizon_samples, 1))

    The bound on the samples is ours: five horizons in one step would make the coefficient negative.
    """

    value: float
    target: float
    horizon_samples: float

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon_samples <= 0:
            raise ConfigurationError(
                f"AdaptiveKL needs target > 0 and horizon_samples > 0, got target {self.target}, "
                f"horizon_samples {self.horizon_samples}; use FixedKL for a coefficient that stays"
            )

    def update(self, observed: float, samples: int) -> None:
        """Move the coefficient towards the target; `observed` is the mean over all ranks.

        One that is not a number, from a step whose update was skipped, says nothing and changes nothing.
        """
        if math.isnan(observed):
            return
        error = min(max(observed / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * min(samples / self.horizon_samples, 1.0)

    def state_dict(self) -> dict[str, float]:
        """The coefficient; target and horizon belong to the configuration."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the coefficient."""
        self.value = state["value"]
