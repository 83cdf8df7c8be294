"""The generated problems: right answers, disjoint splits whatever the seed, and really different wordings."""

import re

import pytest
from gsm8k_app.problems import generate, split_of, templates, worked_turns

from rft_trainer.errors import ConfigurationError


@pytest.mark.parametrize("steps", [1, 2])
def test_answers_follow_from_the_numbers_of_the_question(steps):
    for problem in generate("train", 400, seed=11, steps=[steps]):
        *lines, final = problem["answer"].split("\n")
        assert len(lines) == steps
        carried = None
        operands = []
        for line in lines:
            left, sign, right, result = re.fullmatch(r"(\d+) ([-+*]) (\d+) = (\d+)", line).groups()
            left, right, result = int(left), int(right), int(result)
            assert result == {"+": left + right, "-": left - right, "*": left * right}[sign] >= 1
            operands += [right] if carried is not None else [left, right]
            assert carried in (None, left)
            carried = result
        assert final == f"#### {carried}"
        # The sentence of a product names its numbers in either order; every other sentence names one.
        assert sorted(map(int, re.findall(r"\d+", problem["question"]))) == sorted(operands)
        assert "{" not in problem["question"]


def test_the_two_splits_never_share_numbers_in_a_template():
    for steps in (1, 2):
        chosen = templates(steps)[:50]
        for template in chosen:
            both = {
                split_of(template, (first, second, third))
                for first in range(2, 6)
                for second in range(2, 6)
                for third in range(2, 6)
            }
            assert both == {"train", "test"}
    train = {problem["question"] for seed in range(3) for problem in generate("train", 1500, seed)}
    test = {problem["question"] for seed in range(3) for problem in generate("test", 500, seed)}
    assert not train & test


def test_names_and_nouns_do_not_make_a_test_problem_new():
    """Without the words that are left out of the split's hash, train and test still share no question."""
    from gsm8k_app.scenes import NAMES, SCENES

    words = re.compile("|".join(rf"\b{word}\b" for word in (*NAMES, *(n for scene in SCENES for n in scene.nouns))))

    def bare(split, count):
        return {words.sub("_", problem["question"]) for problem in generate(split, count, seed=0, steps=[1])}

    assert not bare("train", 3000) & bare("test", 1000)


def test_a_seed_gives_the_same_problems_and_more_only_append():
    assert generate("test", 30, seed=5)[:20] == generate("test", 20, seed=5)
    assert generate("test", 20, seed=5) != generate("test", 20, seed=6)
    first = generate("test", 500, seed=5)
    assert len({problem["question"] for problem in first}) == len(first)


def test_steps_go_round():
    lengths = [problem["answer"].count("=") for problem in generate("train", 6, seed=0, steps=(1, 2, 2))]
    assert lengths == [1, 2, 2, 1, 2, 2]


def test_there_are_hundreds_of_wordings():
    assert len(templates(1)) >= 500
    assert len(templates(2)) >= 5000
    stripped = {re.sub(r"\d+", "N", problem["question"]) for problem in generate("train", 400, seed=1)}
    assert len(stripped) > 390


def test_worked_turns_alternate_and_are_right():
    turns = worked_turns()
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
    for turn in turns[1::2]:
        first, final = turn["content"].split("\n")
        left, right = re.fullmatch(r"= ([\d +*-]+) = (\d+)", first).groups()
        assert eval(left) == int(right)
        assert final == f"#### {right}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dev", 1, 0), "split is 'dev'"),
        (("train", -1, 0), "count is -1"),
        (("train", 1, 0, ()), r"steps is \(\)"),
        (("train", 1, 0, (3,)), r"steps is 3; problems have \[1, 2\] steps"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        generate(*arguments)
