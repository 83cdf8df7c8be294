"""What scoring gives: a score per function and sample, and the result per sample."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Score:
    """One function's verdict on one sample; a function may return a plain number instead.

    Attributes:
        value: the raw score, before any weight; None says that there is no score (see `RewardRecipe.missing`).
            With `steps` and no value it is the sum of the steps.
        steps: process rewards as (index into `response_ids`, raw score).
        diagnostics: whatever explains the score, copied to `RewardResult.diagnostics`.
        counts: events to be summed over samples for metrics, e.g. `{"timeouts": 1}`.
    """

    value: float | None = None
    steps: Sequence[tuple[int, float]] = ()
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The reward of one sample.

    Attributes:
        total: sum of `weighted`; this is what a trainer uses and logs.
        scores: raw score by function name, before weights.
        weighted: score times weight by function name.
        diagnostics: by function name, what the function said about this sample.
        step_rewards: process rewards, weighted and summed over functions, as (index into `response_ids`, reward)
            in rising order; None where no function of the recipe gave any. Their sum is part of `total`.
        missing: names of the functions that gave no score for this sample.
    """

    total: float
    scores: dict[str, float]
    weighted: dict[str, float]
    diagnostics: dict[str, dict[str, Any]] = field(default_factory=dict)
    step_rewards: tuple[tuple[int, float], ...] | None = None
    missing: tuple[str, ...] = ()

    def token_rewards(self, length: int) -> list[float]:
        """Rewards laid on `length` response tokens, `[length]`; they sum to `total`.

        Process rewards lie at their tokens; everything else lies on the last token.

        Raises:
            ValueError: `length` is below 1 or does not reach the last process reward.
        """
        steps = self.step_rewards or ()
        needed = max((index for index, _ in steps), default=0) + 1
        if length < needed:
            raise ValueError(f"length is {length} but rewards lie up to token {needed - 1}: give at least {needed}")
        rewards = [0.0] * length
        for index, reward in steps:
            rewards[index] += reward
        outcome = self.total - math.fsum(reward for _, reward in steps)
        if abs(outcome) > 1e-12 * max(1.0, abs(self.total)):  # else it is rounding of the sum, not a reward
            rewards[-1] += outcome
        return rewards
