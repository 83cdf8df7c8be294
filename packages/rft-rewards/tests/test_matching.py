import pytest

from rft_rewards import answers_match
from rft_rewards.matching import quick_verdict
from rft_rewards.spelling import spelled_latex


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("1,000", "1000"),
        ("39", "39.0"),
        ("\\frac{1}{2}", ".5"),
        ("3/4", "0.75"),
        ("\\frac{3}{4}", "3/4"),
        ("1e3", "1000"),
        ("0.333", "1/3"),
        ("2/3", "0.667"),
        ("70%", "70"),
        ("70%", "0.7"),
        ("33.3%", "1/3"),
        ("18 dollars", "18"),
        ("$18", "18 dollars"),
        ("12cm", "12 cm"),
        ("5 million", "5,000,000"),
        ("\\text{Evelyn}", "evelyn"),
        ("(C)", "\\text{(C)}"),
        ("90^\\circ", "90"),
        ("\\boxed{\\frac{3}{4}}", "0.75"),
        ("the answer is 42", "42"),
        ("\u221212", "-12"),
        ("10 000", "10000"),
        ("0.1\\overline{6}", "1/6"),
        ("\u00bc", "0.25"),
        ("1" * 3000, "1" * 3000),
    ],
)
def test_equal_without_mathematics(answer, gold):
    assert quick_verdict(answer, gold) is True
    assert answers_match(answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("38.97", "39"),
        ("39.0000001", "39"),
        ("0.30000000000000004", "0.3"),
        ("0.33", "1/3"),
        ("0.334", "1/3"),
        ("0.12", "1/8"),
        ("4,850", "48500"),
        ("48", "48500"),
        ("-48500", "48500"),
        ("485000", "48500"),
        ("3/5", "3/4"),
        ("7", "70%"),
        ("12 cm", "12 m"),
        ("15 cm^2", "15 cm^3"),
        ("18 cents", "$18"),
        ("12 \\text{ cm}", "12 \\text{ m}"),
        ("5 million", "5"),
        ("2 and a half", "2"),
        ("", "42"),
        (" ", "42"),
        ("", ""),
        (" ", " "),
        ("A or B or C", "A"),
        ("the answer is not A", "A"),
        ("not A", "A"),
        ("AB", "A"),
        ("maybe 42 maybe 43", "42"),
        ("I do not know", "42"),
        ("\\text{west}", "\\text{east}"),
        ("9**9**9", "1"),
        ("9^{9^{9}}", "9"),
        ("100000000!", "1"),
        ("2^{1000000}", "2"),
        ("1" * 3000, "1" * 3001),
        ("?", "42"),
        ("x" * 1_000_000, "42"),
        ("1," * 500_000, "42"),
        ("{" * 10_000 + "}" * 10_000, "42"),
        ("\x00", "42"),
        ("**" * 500_000 + "1", "42"),
        ("1" + ",\\!234" * 170_000 + "5", "42"),
    ],
)
def test_unequal_without_mathematics(answer, gold):
    assert quick_verdict(answer, gold) is False
    assert not answers_match(answer, gold)


def test_none_matches_nothing():
    assert not answers_match(None, "42")


@pytest.mark.parametrize("answer", ["\u221a{}", "\u221a()"])
def test_a_root_sign_without_content_is_read(answer):
    assert spelled_latex(answer) == "\\sqrt{}"
    assert quick_verdict(answer, "42") is None
    assert not answers_match(answer, "42")


def test_null_bytes_inside_are_nothing():
    assert answers_match("4\x002", "42")


def test_a_denominator_that_is_finite_is_never_rounded():
    assert not answers_match("0.125", "0.1251")
    assert not answers_match("0.1", "1/8")
    assert answers_match("0.142857", "1/7")
    assert not answers_match("0.142856", "1/7")
