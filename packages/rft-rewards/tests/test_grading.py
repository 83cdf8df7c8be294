import json
import threading
from pathlib import Path

import pytest

from rft_rewards import Grader, MissingExtraError, RewardComputationEngine, RewardRecipe, RewardSample, exact_answer
from rft_rewards import grading as grading_module

PAIRS = Path(__file__).resolve().parents[3] / "benchmarks" / "data" / "hard_pairs.jsonl"


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("0.1+0.2", "0.3", True),
        ("\\frac{2}{15}", "\\frac{21}{5}", False),
        ("x^2+2x+1", "(x+1)^2", True),
        ("x^2+2x-1", "(x+1)^2", False),
        ("\\sqrt{12}", "2\\sqrt{3}", True),
        ("(1,2)", "\\{1,2\\}", False),
        ("1,-2", "-2,1", True),
        ("[2,3)", "[2,3]", False),
        ("x > 5", "(5,\\infty)", True),
        ("52_8", "52_9", False),
        ("(1+i)^2", "2i", True),
        ("\\begin{pmatrix} 1 & 3 \\\\ 2 & 4 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", False),
        ("x = 1 \\text{ or } x = -2", "-2, 1", True),
        ("((((((((1))))))))", "1", True),
        ("\\sqrt{", "1", False),
        ("\\frac{1}{", "1", False),
        ("41 or 42", "42", False),
        ("1 million", "10^6", True),
        ("10\u207b\u00b3", "0.001", True),
        ("\\langle 1,2,3 \\rangle", "(1,2,3)", True),
        ("3 \\ge x", "(-\\infty,3]", True),
        ("x_1", "x_2", False),
        ("f(x)=2x", "y=2x", False),
        ("\\sin^2 x + \\cos^2 x", "1", True),
        ("1e999999999", "1", False),
        ("1/0", "1", False),
    ],
)
def test_mathematics(grader, answer, gold, equal):
    assert [verdict.equal for verdict in grader.grade([(answer, gold)])] == [equal]


def test_tuning_pairs_are_all_right(grader):
    if not PAIRS.exists():
        pytest.skip("no benchmarks/data/hard_pairs.jsonl: the tests run outside of the repository")
    lines = PAIRS.read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["split"] == "tuning"]
    verdicts = grader.grade([(row["answer"], row["gold"]) for row in rows])
    wrong = [row for row, verdict in zip(rows, verdicts, strict=True) if verdict.equal != row["equal"]]
    assert len(rows) == 378
    assert wrong == []


def test_math_golds_equal_themselves_and_no_neighbour(grader, math_golds):
    others = [*math_golds[1:], "977"]
    verdicts = grader.grade([(f"\\boxed{{{gold}}}", gold) for gold in math_golds])
    assert all(verdict.equal for verdict in verdicts)
    pairs = [(gold, other) for gold, other in zip(math_golds, others, strict=True) if gold != other]
    assert [pair for pair, verdict in zip(pairs, grader.grade(pairs), strict=True) if verdict.equal] == [("5", "x=5")]


def test_order_and_length_are_kept_with_repeats(grader):
    pairs = [("1", "1"), (None, "1"), ("x+y", "y+x"), ("1", "1"), ("", "1"), ("x+y", "y+x"), ("x-y", "y-x")]
    assert [verdict.equal for verdict in grader.grade(pairs)] == [True, False, True, True, False, True, False]
    assert grader.grade([]) == []


def test_eight_threads_share_the_workers(grader):
    results = {}

    def grade(index):
        results[index] = [
            verdict.equal for verdict in grader.grade([(f"x+{index}", f"{index}+x"), ("x", f"x-{index + 1}")])
        ]

    threads = [threading.Thread(target=grade, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: [True, False] for index in range(8)}


def test_hostile_expressions_end_within_the_limit():
    pytest.importorskip("math_verify")
    grader = Grader(workers=1, timeout_seconds=3.0)
    pairs = [
        ("9^(9^(9^9))", "1"),
        ("\\int_0^1 \\sin(x^x) e^{x^2} \\Gamma(x) dx", "1"),
        ("\\sum_{k=1}^{99999} \\frac{1}{k^{k}}", "2"),
        ("(" * 400 + "x" + ")" * 400, "y"),
        ("\\frac{" * 150 + "x", "y"),
        ("\x00x+1", "1+x"),
        ("1/3", "1/3"),
    ]
    verdicts = grader.grade(pairs)
    assert [verdict.equal for verdict in verdicts] == [False] * 5 + [True, True]
    grader.close()


def test_a_pair_over_the_limit_scores_zero_and_is_counted():
    pytest.importorskip("math_verify")
    slow = RewardSample("\\boxed{\\int_0^1 \\sin(x^x) e^{x^2} \\Gamma(x) dx}", reference="x+1")
    grader = Grader(workers=1, timeout_seconds=0.05)
    engine = RewardComputationEngine(RewardRecipe(functions=[exact_answer("boxed", grader=grader)]))
    (result,) = engine.compute([slow])
    grader.close()
    assert result.total == 0.0
    assert result.diagnostics["accuracy"]["timeouts"]
    assert engine.take_counters()["accuracy/timeouts"] == 1


def test_off_says_what_it_could_not_decide():
    grader = Grader(symbolic="off")
    verdict = grader.grade([("x+1", "1+x")])[0]
    assert (verdict.equal, verdict.unavailable, verdict.symbolic) == (False, True, False)
    assert grader.grade([("42", "42.0")])[0].equal


def test_without_math_verify_require_fails_and_auto_counts(monkeypatch):
    monkeypatch.setattr(grading_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"rft-rewards\[math\]"):
        Grader(symbolic="require")
    assert Grader().grade([("x+1", "1+x")])[0].unavailable


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="symbolic is 'maybe'"):
        Grader(symbolic="maybe")
    with pytest.raises(ValueError, match="workers is 0"):
        Grader(workers=0)
    with pytest.raises(ValueError, match="timeout_seconds is 0"):
        Grader(timeout_seconds=0)
