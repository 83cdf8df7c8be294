"""math-verify's own reading of a whole response."""

import pytest

from rft_rewards import MissingReferenceError, RewardSample, symbolic_answer

pytest.importorskip("math_verify")

CASES = [
    ("48/2 = 24\n48+24 = 72\n#### 72", "72", 1.0, "72"),
    ("so the answer is 72 clips", "#### 72", 1.0, "72"),
    ("it costs $18 every day", "18", 1.0, "18"),
    ("\\boxed{\\frac{1}{2}}", "0.5", 1.0, "1/2"),
    ("#### 1,234", "1234", 1.0, "1234"),
    ("5 apples and 7 pears", "5", 0.0, "7"),
    ("no idea", "3", 0.0, None),
    ("", "3", 0.0, None),
]


def test_the_answer_is_found_anywhere_and_read_as_mathematics():
    scores = symbolic_answer()([RewardSample(text, reference=gold) for text, gold, *_ in CASES])
    assert [(score.value, score.diagnostics["answer"]) for score in scores] == [case[2:] for case in CASES]
    assert [score.counts["missing_answer"] for score in scores] == [0, 0, 0, 0, 0, 0, 1, 1]


def test_a_sample_without_a_gold_answer_is_an_error():
    with pytest.raises(MissingReferenceError, match=r"accuracy_symbolic needs RewardSample\.reference"):
        symbolic_answer()([RewardSample("5")])
