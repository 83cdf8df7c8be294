import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("math_verify")

from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from rft_rewards import FormatTemplate, extract_boxed, extract_gsm8k
from rft_rewards.matching import quick_verdict
from rft_rewards.plain_text import plain_characters
from rft_rewards.spelling import compact, spelled_latex

FRAGMENTS = [
    *("#### ", "####", "\\boxed{", "\\boxed ", "\\fbox{", "}", "{", "(", ")", "[", "]", "\\{", "\\}", "$", "\\$", "$$"),
    *("\\(", "\\)", "\\\\", "\\,", ",\\!", ",", ".", ";", ":", "=", "<", ">", "+", "-", "*", "**", "^", "_", "/", "!"),
    *("%", "\\%", " ", "\n", "0", "1", "7", "42", "1,234", "3.14", ".5", "1e3", "1e999", "007", "\u2212", "\uff14"),
    *("\u0664", "\u00bd", "\u00b2", "\u221a", "\u03c0", "\u221e", "\u20ac", "\u00b0", "\u2009", "\x00", "\ud800", "|"),
    *(
        "x",
        "i",
        "e",
        "ab",
        "x=",
        "\\frac",
        "\\frac{1}{2}",
        "\\frac12",
        "\\dfrac",
        "\\sqrt",
        "\\sqrt{2}",
        "\\pi",
        "\\pm",
    ),
    *(
        "\\pm",
        "\\infty",
        "\\times",
        "\\cdot",
        "\\cup",
        "\\in",
        "\\le",
        "\\text{",
        "\\text{ and }",
        "\\left",
        "\\right",
        "&",
    ),
    *("^\\circ", "\\begin{pmatrix}", "\\end{pmatrix}", "\\over", "\\sin", "\\log", "and", "or", "not", "dollars", "cm"),
    *("million", "percent", "half", "<think>", "</think>", "answer is ", "the ", "A", "(B)", "_8", "10^", "9^9^"),
    *("\\mathrm{", "\\overline", "\\sum", "\\int", "\\binom"),
]

responses = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map(lambda parts: "\\boxed{" + "".join(parts) + "}"),
    st.lists(st.sampled_from(FRAGMENTS), max_size=6).map(lambda parts: "so\n#### " + "".join(parts)),
    st.text(max_size=200),
    st.decimals(allow_nan=False, allow_infinity=False, places=3).map(lambda number: f"it is {number:,}"),
)
golds = st.sampled_from(["42", "\\frac{1}{2}", "x^2+1", "(1,2)", "1 \\pm \\sqrt{2}", "\\text{even}", "[2,3)", "52_8"])


def _answers(response):
    """Check what needs no mathematics; the answers that the policies find."""
    answers = []
    for policy in ("strict", "flexible", "boxed"):
        answer = extract_gsm8k(response, policy)
        if answer is None:
            continue
        assert answer
        if policy != "boxed":
            assert extract_gsm8k(answer, "flexible") == answer
            assert extract_gsm8k(f"#### {answer}", "strict") == answer
        answers.append(answer)
    content = extract_boxed(response)
    if content is not None:
        assert extract_boxed(f"\\boxed{{{content}}}") == content
    plain = plain_characters(response)
    assert plain_characters(plain) == plain
    assert isinstance(compact(spelled_latex(response)), str)
    assert FormatTemplate().fits(response) in (True, False)
    return answers


def _fuzz(grader, examples, most_graded):
    """Score `examples` random responses, five to a case; grade at most `most_graded` of the pairs left open."""
    pairs = {}

    @settings(max_examples=examples // 5, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @seed(20250101)
    @given(five=st.tuples(*[responses] * 5), gold=golds)
    @example(five=("\\boxed{9^(9^(9^9))}", "#### 1e999999", "\\boxed{\\frac{1}{0}}", "\\boxed{1/0}", "\x00"), gold="42")
    def score(five, gold):
        for answer in (answer for response in five for answer in _answers(response)):
            if quick_verdict(answer, gold) is None:
                pairs[answer, gold] = None

    score()
    graded = list(pairs)[:most_graded]
    verdicts = grader.grade(graded)
    assert len(graded) == min(most_graded, len(pairs)) > examples // 50
    odd = [pair for pair, verdict in zip(graded, verdicts, strict=True) if verdict.timed_out or verdict.failed]
    assert odd == []


def test_two_thousand_responses_are_scored(grader):
    _fuzz(grader, 2_000, most_graded=200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_responses_are_scored(grader):
    _fuzz(grader, 100_000, most_graded=100_000)
