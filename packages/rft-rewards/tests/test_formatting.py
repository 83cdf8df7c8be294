import pytest

from rft_rewards import FormatTemplate, RewardSample, has_format


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>two and two</think> \\boxed{4}", 1.0),
        ("  <think>\ntwo\n</think>\n\nSo it is \\boxed{4}.", 1.0),
        ("\\boxed{4} <think>two and two</think>", 0.0),
        ("<think>\\boxed{4}</think> so \\boxed{4}", 1.0),  # a box inside the reasoning does not count
        ("<think>\\boxed{4}</think> so 4", 0.0),
        ("<think>two and two</think> 4", 0.0),
        ("<think></think> \\boxed{4}", 0.0),
        ("<think> \n </think> \\boxed{4}", 0.0),
        ("<think>two</think> \\boxed{}", 0.0),
        ("<think>two</think> \\boxed{ }", 0.0),
        ("<think>two</think> \\boxed{4", 0.0),
        ("<think>two</think> \\boxed{4} or \\boxed{5}", 0.0),
        ("<think>a</think><think>b</think> \\boxed{4}", 0.0),
        ("<think>a<think>b</think> \\boxed{4}", 0.0),
        ("well <think>a</think> \\boxed{4}", 0.0),
        ("two</think> \\boxed{4}", 0.0),
        ("", 0.0),
    ],
)
def test_default_template(response, score):
    assert has_format()([RewardSample(response)]) == [score]


def test_the_prompt_is_never_scored():
    prompt = "Think in <think>here</think>, then give \\boxed{answer}."
    assert has_format()([RewardSample("2", prompt=prompt)]) == [0.0]


def test_other_marks_are_data():
    template = FormatTemplate(think=("[reason]", "[/reason]"), answer=("[answer]", "[/answer]"), final=None)
    function = has_format(template, name="layout")
    fitting, *others = (
        "[reason]r[/reason] [answer]4[/answer]",
        "[reason]r[/reason] [answer]4[/answer] and more",
        "[reason]r[/reason] [answer] [/answer]",
        "[reason]r[/reason] [answer]4[/answer][answer]5[/answer]",
        "[answer]4[/answer] [reason]r[/reason]",
        "<think>r</think> [answer]4[/answer]",
    )
    assert function.name == "layout"
    assert function([RewardSample(fitting)]) == [1.0]
    assert function([RewardSample(other) for other in others]) == [0.0] * 5


def test_opening_mark_in_the_prompt():
    template = FormatTemplate(open_in_prompt=True)
    assert template.fits("two and two</think> \\boxed{4}")
    assert not template.fits("</think> \\boxed{4}")
    assert not template.fits("<think>two</think> \\boxed{4}")


def test_marked_answers():
    template = FormatTemplate(think=None, final="marked")
    assert template.fits("2 + 2 = 4\n#### 4")
    assert not template.fits("2 + 2 = 4")
    assert not template.fits("#### 3\n#### 4")
    assert not template.fits("#### four")


@pytest.mark.parametrize(
    "arguments",
    [{"think": ("<t>", "<t>")}, {"think": ("", "</t>")}, {"answer": ("a",)}, {"final": "xml"}],
)
def test_templates_are_checked(arguments):
    with pytest.raises(ValueError, match="give"):
        FormatTemplate(**arguments)
    with pytest.raises(ValueError, match="open_in_prompt"):
        FormatTemplate(think=None, open_in_prompt=True)
