"""Estimates from an evaluation: pass@k, majority votes and confidence intervals, as functions of counts."""

import math
from collections.abc import Sequence

from rft_rewards import Grader

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that `k` of the samples, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.

    Raises:
        ValueError: k is not in 1..samples, or right not in 0..samples.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {right} right: needs 1 <= k <= samples, right <= samples")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_share(answers: Sequence[str | None], right: Sequence[bool], grader: Grader) -> float:
    """Probability that the most frequent answer is right, a tie being broken by chance.

    Answers that `grader` holds for equal are one answer; those that are None take no part. 0 when there is none.
    """
    votes: list[tuple[str, list[bool]]] = []
    for answer, correct in zip(answers, right, strict=True):
        if answer is None:
            continue
        verdicts = grader.grade([(answer, leader) for leader, _ in votes])
        place = next((i for i, verdict in enumerate(verdicts) if verdict.equal or votes[i][0] == answer), None)
        if place is None:
            votes.append((answer, [correct]))
        else:
            votes[place][1].append(correct)
    most = max((len(members) for _, members in votes), default=0)
    leaders = [members for _, members in votes if len(members) == most]
    return sum(members[0] for members in leaders) / len(leaders) if leaders else 0.0


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of `count` independent yes-or-no outcomes (Wilson 1927)."""
    spread = Z95**2 / count
    centre = (mean + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(mean * (1 - mean) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def interval(mean: float, mean_square: float, count: int) -> tuple[float, float]:
    """95 % interval of a mean over `count` items, from the mean of the values and of their squares.

    Wilson's for values that are all 0 or 1; else the normal interval with the sample variance, so that several samples
    of one item, which are not independent, enter by their mean as one value.
    """
    if math.isclose(mean, mean_square, abs_tol=1e-12) and 0 <= mean <= 1:
        return wilson_interval(mean, count)
    if count < 2:
        return -math.inf, math.inf
    variance = max(0.0, mean_square - mean**2) * count / (count - 1)
    half = Z95 * math.sqrt(variance / count)
    return mean - half, mean + half
