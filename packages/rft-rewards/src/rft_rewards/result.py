"""The weighted sum: parts of one sample to its `RewardResult`."""

import math
from collections.abc import Sequence

from rft_rewards.errors import InvalidScoreError
from rft_rewards.score import RewardResult, Score


def result_of_parts(position: int, parts: Sequence[tuple[str, float, Score, float | None]]) -> RewardResult:
    """Result of the sample at `position` from its parts (name, weight, score, score to count where it is missing).

    Raises:
        InvalidScoreError: a score is missing and there is no rule for it.
    """
    scores, weighted, missing = {}, {}, []
    steps: dict[int, float] = {}
    for name, weight, score, substitute in parts:
        value = score.value
        if value is None:
            if substitute is None:
                raise InvalidScoreError(
                    f"reward function {name!r} gave sample {position} no score (None): "
                    f"return a number, or set missing={{{name!r}: ...}} in the recipe"
                )
            value = float(substitute)
            missing.append(name)
        scores[name], weighted[name] = value, weight * value
        for index, reward in score.steps:
            steps[index] = steps.get(index, 0.0) + weight * reward
    has_steps = any(score.steps for _, _, score, _ in parts)
    return RewardResult(
        total=math.fsum(weighted.values()),
        scores=scores,
        weighted=weighted,
        diagnostics={name: dict(score.diagnostics) for name, _, score, _ in parts if score.diagnostics},
        step_rewards=tuple(sorted(steps.items())) if has_steps else None,
        missing=tuple(missing),
    )
