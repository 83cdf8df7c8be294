"""How far the engine's log-probabilities are from the trainer's."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LogProbGap:
    """Difference of engine and trainer log-probabilities over real tokens.

    Attributes:
        tokens: number of tokens compared; with 0 the other numbers are 0.
        mean: mean |gap|.
        largest: max |gap|.
        outside: share of tokens whose probability ratio is outside [0.9, 1.1].
    """

    tokens: int
    mean: float
    largest: float
    outside: float

    def exceeds(self, *, mean_limit: float) -> bool:
        """Whether the mean gap is above the limit, with a warning when it is. Healthy bf16 runs have 0.01 - 0.02."""
        if self.mean <= mean_limit:
            return False
        logger.warning(
            "engine and trainer log-probabilities differ by %.4f on average (limit %.4f), by %.4f at most, %.1f %% of "
            "ratios outside [0.9, 1.1] over %d tokens: check the last weight update, the prefix cache and the "
            "temperature of both sides",
            self.mean, mean_limit, self.largest, 100 * self.outside, self.tokens,
        )  # fmt: skip
        return True


def log_prob_gap(engine: Tensor, trainer: Tensor, mask: Tensor) -> LogProbGap:
    """Compare log-probabilities [B, T] of engine and trainer where mask [B, T] is true."""
    real = mask.bool()
    gap = engine[real].double() - trainer[real].double()
    if gap.numel() == 0:
        return LogProbGap(tokens=0, mean=0.0, largest=0.0, outside=0.0)
    ratio = gap.exp()
    outside = (ratio < 0.9) | (ratio > 1.1)
    return LogProbGap(
        tokens=gap.numel(),
        mean=float(gap.abs().mean()),
        largest=float(gap.abs().max()),
        outside=float(outside.double().mean()),
    )


def padded_log_probs(rows: list[tuple[float, ...]]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and mask [B, T] of samples of any lengths, also 0; T is the longest, at least 1."""
    width = max([len(row) for row in rows] + [1])
    values, mask = torch.zeros(len(rows), width), torch.zeros(len(rows), width, dtype=torch.bool)
    for place, row in enumerate(rows):
        values[place, : len(row)] = torch.tensor(row)
        mask[place, : len(row)] = True
    return values, mask
