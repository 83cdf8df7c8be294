"""Estimates against hand-computed values and against brute force."""

from itertools import combinations

import pytest

from rft_rewards import Grader
from rft_trainer.trainer.estimates import interval, majority_share, pass_at_k, wilson_interval


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 2), (5, 3, 2), (6, 0, 3), (6, 6, 1), (8, 2, 8)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, c, k):
    subsets = list(combinations(range(n), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(i < c for i in s) for s in subsets) / len(subsets))


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    with pytest.raises(ValueError, match="pass@3 of 2 samples"):
        pass_at_k(2, 1, 3)


def test_majority():
    grader = Grader(symbolic="off")
    vote = lambda answers, right: majority_share(answers, right, grader)  # noqa: E731
    assert vote(["7", "7.0", "8"], [True, True, False]) == 1.0  # 7 and 7.0 are one answer
    assert vote(["7", "8", "8"], [True, False, False]) == 0.0
    assert vote(["7", "8"], [True, False]) == 0.5  # a tie, broken by chance
    assert vote(["1", "2", "3"], [False, True, False]) == pytest.approx(1 / 3)
    assert vote([None, None, "8"], [False, False, False]) == 0.0
    assert vote([None, None, "7"], [False, False, True]) == 1.0
    assert vote([None], [False]) == 0.0


def test_wilson_by_hand():
    low, high = wilson_interval(0.5, 100)
    assert (low, high) == pytest.approx((0.403832, 0.596168), abs=1e-6)
    low, high = wilson_interval(0.0, 10)
    assert low == 0.0
    assert high == pytest.approx(0.277533, abs=1e-6)  # z^2 / (n + z^2)


def test_interval_of_values_that_are_no_shares():
    values = [0.0, 0.5, 1.0, 0.5]
    mean, square = sum(values) / 4, sum(v * v for v in values) / 4
    # sample variance 1/6, standard error sqrt(1/24)
    assert interval(mean, square, 4) == pytest.approx((0.5 - 1.959964 * 24**-0.5, 0.5 + 1.959964 * 24**-0.5))
    assert interval(0.25, 0.25, 8) == wilson_interval(0.25, 8)
    assert interval(0.3, 0.09, 1) == (-float("inf"), float("inf"))
