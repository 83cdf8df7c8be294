"""Grade-school word problems with one or two steps, made from a seed, in GSM8K's own form.

A template is a chain of operations, a scene and one wording for each sentence; numbers are filled in afterwards. Train
and test are disjoint by construction: a hash of (template, numbers), which no seed enters, gives each pair to one of
the two for ever. Names and nouns are left out of the hash, so a test problem is never a train problem with other names.
"""

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from gsm8k_app.scenes import NAMES, SCENES, Scene
from rft_trainer.data import Message
from rft_trainer.errors import ConfigurationError

Split = Literal["train", "test"]
Operation = Literal["add", "take", "times"]

# Chains by number of steps; "times" can only begin a chain, because its sentence names both of its numbers.
CHAINS: dict[int, tuple[tuple[Operation, ...], ...]] = {
    1: (("add",), ("take",), ("times",)),
    2: (("add", "add"), ("add", "take"), ("take", "add"), ("take", "take"), ("times", "add"), ("times", "take")),
}
SMALLEST, LARGEST = 2, 9
LARGEST_START = 10
TEST_SHARE = 5  # one in five (template, numbers) pairs belongs to test


# The leading "=" makes SmolLM2 write an equation instead of prose; which operation it writes is left to be learned.
SYSTEM_PROMPT = "Write one equation."
WORKED_PROBLEMS = (
    ("Tom has 3 apples and gets 4 more. How many apples does Tom have?", "= 3 + 4 = 7\n#### 7"),
    ("Ann has 9 cups. She breaks 2. How many cups are left?", "= 9 - 2 = 7\n#### 7"),
)


class Problem(TypedDict):
    """GSM8K's two fields; `answer` ends in `#### N`."""

    question: str
    answer: str


@dataclass(frozen=True)
class Template:
    """One wording of one chain: indices into the parts of a scene, one for each sentence and one for the question."""

    chain: tuple[Operation, ...]
    scene: int
    sentences: tuple[int, ...]
    question: int


def templates(steps: int) -> list[Template]:
    """Every template with that number of steps.

    Raises:
        ConfigurationError: `steps` is neither 1 nor 2.
    """
    if steps not in CHAINS:
        raise ConfigurationError(f"steps is {steps}; problems have {sorted(CHAINS)} steps")
    found: list[Template] = []
    for chain, (index, scene) in itertools.product(CHAINS[steps], enumerate(SCENES)):
        choices = itertools.product(*(range(len(part)) for part in [*_parts(chain, scene), scene.questions]))
        found.extend(
            Template(chain, index, choice[:-1], choice[-1])
            for choice in choices
            # The same sentence twice reads like a slip.
            if len(chain) == 1 or chain[0] != chain[1] or choice[1] != choice[2]
        )
    return found


def worked_turns() -> tuple[Message, ...]:
    """Chat turns that go before each question; they show the model the form of an answer."""
    return tuple(
        Message(role=role, content=content)
        for turns in WORKED_PROBLEMS
        for role, content in zip(("user", "assistant"), turns, strict=True)
    )


def split_of(template: Template, numbers: Sequence[int]) -> Split:
    """The only split in which these numbers occur with this template."""
    key = repr((template.chain, template.scene, template.sentences, template.question, tuple(numbers)))
    return "test" if hashlib.sha256(key.encode()).digest()[0] % TEST_SHARE == 0 else "train"


def generate(split: Split, count: int, seed: int, steps: Sequence[int] = (1, 1, 2)) -> list[Problem]:
    """`count` different problems of a split; the number of steps goes round through `steps`.

    The same arguments give the same problems, and a larger `count` only appends.

    Raises:
        ConfigurationError: unknown split, a negative count, no or unknown steps.
    """
    if split not in ("train", "test"):
        raise ConfigurationError(f"split is {split!r}; choose 'train' or 'test'")
    if count < 0 or not steps:
        raise ConfigurationError(
            f"count is {count} and steps is {tuple(steps)}; give a count >= 0 and one step at least"
        )
    random_state = random.Random(f"{split} {seed}")
    pools = {number: templates(number) for number in set(steps)}
    problems: list[Problem] = []
    seen: set[tuple[Template, tuple[int, ...]]] = set()
    while len(problems) < count:
        template = random_state.choice(pools[steps[len(problems) % len(steps)]])
        numbers = _draw_numbers(template.chain, random_state)
        if split_of(template, numbers) != split or (template, numbers) in seen:
            continue
        seen.add((template, numbers))
        problems.append(_fill(template, numbers, random_state))
    return problems


def _draw_numbers(chain: Sequence[Operation], random_state: random.Random) -> tuple[int, ...]:
    """Start value and one number for each operation; no result is below 1."""
    while True:
        largest = LARGEST_START if chain[0] == "take" else LARGEST
        numbers = [random_state.randint(SMALLEST, largest)]
        numbers += [random_state.randint(SMALLEST, LARGEST) for _ in chain]
        if min(_results(chain, numbers)) >= 1:
            return tuple(numbers)


def _results(chain: Sequence[Operation], numbers: Sequence[int]) -> list[int]:
    value = numbers[0]
    results = []
    for operation, number in zip(chain, numbers[1:], strict=True):
        value = {"add": value + number, "take": value - number, "times": value * number}[operation]
        results.append(value)
    return results


def _parts(chain: Sequence[Operation], scene: Scene) -> list[tuple[str, ...]]:
    """The wordings to choose from for each sentence before the question."""
    later = [scene.gains if operation == "add" else scene.losses for operation in chain if operation != "times"]
    return [scene.groupings if chain[0] == "times" else scene.openings, *later]


def _fill(template: Template, numbers: Sequence[int], random_state: random.Random) -> Problem:
    scene = SCENES[template.scene]
    name, friend = random_state.sample(NAMES, 2)
    words = {"name": name, "friend": friend, "noun": random_state.choice(scene.nouns)}
    in_first = 2 if template.chain[0] == "times" else 1
    values = [numbers[:in_first], *((number,) for number in numbers[in_first:])]
    sentences = [
        part[choice].format(**dict(zip("nm", value, strict=False)), **words)
        for part, choice, value in zip(_parts(template.chain, scene), template.sentences, values, strict=True)
    ]
    question = scene.questions[template.question].format(**words)
    return Problem(question=" ".join([*sentences, question]), answer=_worked_answer(template.chain, numbers))


def _worked_answer(chain: Sequence[Operation], numbers: Sequence[int]) -> str:
    sign = {"add": "+", "take": "-", "times": "*"}
    value = numbers[0]
    lines = []
    for operation, number, result in zip(chain, numbers[1:], _results(chain, numbers), strict=True):
        lines.append(f"{value} {sign[operation]} {number} = {result}")
        value = result
    return "\n".join([*lines, f"#### {value}"])
