import pytest

from rft_rewards import MissingReferenceError, extract_boxed, extract_gsm8k, gsm8k_reference
from rft_rewards.extraction import count_markers


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 1,234", "1234"),
        ("#### -5", "-5"),
        ("#### 42.", "42"),
        ("#### $18", "18"),
        ("#### 70%", "70"),
        ("#### .5", ".5"),
        ("#### 1\n#### 2", "2"),
        ("#### 1 #### 2 #### 42", "42"),
        ("#### $48,500", "48500"),
        ("#### 48,500.00", "48500.00"),
        ("#### 48500 dollars", "48500"),
        ("#### 48500.", "48500"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### \\$32,\\!348", "32348"),
        ("#### 1{,}080", "1080"),
        ("#### 1\u202f080", "1080"),
        ("#### 1/2", "1/2"),
        ("#### \\frac{1}{2}", "1/2"),
        ("#### 1 1/2 cups", "1 1/2"),
        ("#### 1½", "1 1/2"),
        ("#### \u22125", "-5"),
        ("#### \uff14\uff12", "42"),
        ("#### \u0664\u0662", "42"),
        ("#### **42**", "42"),
        ("#### $42$", "42"),
        ("#### \\(42\\)", "42"),
        ("#### \\boxed{42}", "42"),
        ("####42", "42"),
        ("####\n\n42", "42"),
        ("#### 42!", "42"),
        ("#### 42 (forty-two)", "42"),
        ("#### 5 million", "5000000"),
        ("#### 3 km/h", "3"),
        ("#### 5 m^2", "5"),
        ("#### +7", "7"),
        ("#### 1e3", "1e3"),
        ("#### 1.5 \\times 10^3", "1.5e3"),
        ("#### 0.1\\overline{6}", "15/90"),
        ("#### 42</answer>", "42"),
        ("#### 42<|im_end|>", "42"),
        ("#### (42)", "42"),
        ('#### "42"', "42"),
        ("#### ~~42~~", "42"),
        ("#### 42 *apples*", "42"),
        ("#### \u20ac42", "42"),
        ("#### 42 \u2713", "42"),
    ],
)
def test_answer_behind_the_marker(text, answer):
    assert extract_gsm8k(text, "strict") == answer
    assert extract_gsm8k(text, "flexible") == answer


@pytest.mark.parametrize(
    "text",
    [
        "no marker 42",
        "",
        "#### ",
        "#### unknown",
        "#### 42 or 43",
        "#### 12 x 3 = 36",
        "#### Step 2: add 5",
        "##### 42",
        "### 42",
        "#### 42\n####",
        "#### 1/0",
        "#### 10:30",
        "#### 1.2.3",
        "#### 12/25/2020",
        "#### 1,234,56",
        "#### 2 hours and 30 minutes",
        "#### 42 (or 43)",
        "#### about 42",
        "#### 42 dollars per 2 weeks",
    ],
)
def test_strict_finds_nothing(text):
    assert extract_gsm8k(text, "strict") is None


def test_text_behind_the_answer_does_not_matter():
    text = "three boxes of fourteen\n#### 42\n" + "and so the story ends. " * 21
    assert len(text) > 480
    assert extract_gsm8k(text, "strict") == "42"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("perhaps 36, perhaps 51", "51"),
        ("36", "36"),
        ("12 x 3 = 36, so \\boxed{36}", "36"),
        ("The answer is $48,500.", "48500"),
        ("10-5 = 5", "5"),
        ("that is 10 -5", "5"),
        ("the temperature is -5.", "-5"),
        ("it is \\frac{3}{4}", "3/4"),
        ("the answer is 3/4", "3/4"),
        ("I do not know", None),
        ("", None),
        ("wrong answer 137", "137"),
        ("#### none, so 12", "12"),
        ("#### Step 1: 3\nThe total is 12.", "12"),
        ("1" + "a " * 5000, "1"),
    ],
)
def test_flexible_takes_the_last_number(text, answer):
    assert extract_gsm8k(text, "flexible") == answer


def test_policies_differ_only_where_they_say():
    texts = ["perhaps 36, perhaps 51", "36", "12 x 3 = 36, so \\boxed{36}"]
    assert [extract_gsm8k(text, "strict") for text in texts] == [None, None, None]
    assert [extract_gsm8k(text, "boxed") for text in texts] == [None, None, "36"]
    assert [extract_gsm8k(text, "flexible") for text in texts] == ["51", "36", "36"]
    assert extract_gsm8k("#### 5", "boxed") is None
    assert extract_gsm8k("\\boxed{18\\text{ dollars}}", "boxed") == "18"
    assert extract_gsm8k("\\boxed{x+1}", "boxed") == "x+1"


def test_unknown_policy_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'loose'.*strict, flexible, boxed"):
        extract_gsm8k("#### 1", "loose")


def test_gold_without_marker_is_an_error():
    assert gsm8k_reference("so it is\n#### 48,500") == "48500"
    with pytest.raises(MissingReferenceError, match="no number behind"):
        gsm8k_reference("so it is 48,500")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{1} and \\boxed{ 2 }", "2"),
        ("\\boxed{\\frac{3}{4}}", "\\frac{3}{4}"),
        ("\\boxed{a{b{c{d}}}}", "a{b{c{d}}}"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed{a \\fbox{b} c}", "a \\fbox{b} c"),
        ("\\boxed {7}", "7"),
        ("\\boxed 7", "7"),
        ("\\boxed 7.", "7"),
        ("\\fbox{7}", "7"),
        ("\\framebox{7}", "7"),
        ("\\\\boxed{7}", "7"),
        ("boxed{7}", "7"),
        ("\x08oxed{7}", "7"),
        ("$\\boxed{7}$.", "7"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("{ \\boxed{3}", "3"),
        ("\\boxed{\\text{a}} }", "\\text{a}"),
        ("\\boxed{3} then \\boxed{4", "3"),
        ("\\boxed{4", None),
        ("\\boxed{\\frac{3}{4}", None),
        ("\\boxed{}", None),
        ("\\boxed{3} then \\boxed{ }", None),
        ("no box", None),
        ("", None),
        ("boxed", None),
    ],
)
def test_last_complete_box(text, content):
    assert extract_boxed(text) == content


def test_boxes_nest_deeply_in_linear_time():
    depth = 10_000
    assert extract_boxed("\\boxed{" + "{" * depth + "1" + "}" * depth + "}") == "{" * depth + "1" + "}" * depth
    assert extract_boxed("\\boxed{" * 140_000) is None
    assert extract_boxed("\\boxed{ " * depth + "5" + " }" * depth) == "5"
    assert extract_boxed("x" + "}" * 1_000_000) is None


HOSTILE = [
    "a",
    "1",
    "1,",
    "1 ",
    "#",
    "#### ",
    "####\n",
    "-",
    "$",
    "{",
    "}",
    "\\boxed",
    "\\boxed{",
    "1,\\!234",
    "1\u2009",
]


@pytest.mark.parametrize("unit", [*HOSTILE, " ", "1\u2009", "\u0664"])
def test_a_megabyte_of_anything_is_read(unit):
    text = unit * (1_000_000 // len(unit))
    for policy in ("strict", "flexible", "boxed"):
        extract_gsm8k(text, policy)
        extract_gsm8k("#### 42\n" + text, policy)
    assert extract_gsm8k(text + "\n#### 42", "strict") == "42"


def test_markers_are_counted():
    assert count_markers("#### 1 #### 2 #### 42") == 3
    assert count_markers("\\boxed{1} \\boxed{2}", "boxed") == 2
    assert count_markers("\\boxed{\\boxed{1}}", "boxed") == 1
    assert count_markers("nothing") == 0


def test_all_gsm8k_golds(gsm8k_answers):
    for text in gsm8k_answers:
        plain = text.rpartition("####")[2].strip().replace(",", "")
        assert gsm8k_reference(text) == plain
        assert extract_gsm8k(text, "flexible") == plain
