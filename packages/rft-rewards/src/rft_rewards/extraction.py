"""Finding the answer in a response."""

import re
from typing import Literal, TypeAlias, get_args

from rft_rewards.errors import MissingReferenceError
from rft_rewards.quantity import NUMBER, parse_quantity, quantity_of_match, spelled_plainly, unwrapped

ExtractionPolicy: TypeAlias = Literal["strict", "flexible", "boxed"]
"""Where an answer is looked for.

* `strict`: behind the last `####`, and nowhere else.
* `flexible`: behind the last `####`; where that holds no number, the last number of the whole text.
* `boxed`: the last complete box, and nowhere else.
"""

_MARKER = re.compile(r"(?<!#)####(?!#)")
_LEAD = re.compile(r"[\s*_=:`~(\[\"']*(?:\\\(|\\\[|\$(?=[^\d.]))?\s*")
_LINE = 4000
# Tails of a text to look at before the whole of it. A number that starts within the slack may be cut, and the next
# larger tail decides.
_WINDOWS = ((150, 60), (4000, 1200))
_LAST_DIGIT = re.compile("[\\d\u00bc-\u00be\u2150-\u215e\u2189]")
_STRETCH = re.compile("[^=<>:;()]+")  # no number goes over these, so the last stretch with a number decides
_MARKS = 30  # what may belong to a number behind its last digit: braces, a percent sign, a scale word

# A box is opened by \boxed or \fbox, also where the backslash was doubled, or where "\b" became a backspace.
_OPENING = r"(?:\\{1,2}|\x08o?)?(?:b?oxed|fbox|framebox)\s*\{"
_BOX_TOKEN = re.compile(rf"(?P<open>{_OPENING})|\\[{{}}\\]|(?P<left>\{{)|(?P<right>\}})")
_BARE_BOX = re.compile(r"\\boxed\s+(\\?[A-Za-z0-9.+-]*[A-Za-z0-9])")


def check_policy(policy: str) -> None:
    """Raise ValueError unless `policy` is one of `ExtractionPolicy`."""
    if policy not in get_args(ExtractionPolicy):
        raise ValueError(f"policy is {policy!r}: give one of {', '.join(get_args(ExtractionPolicy))}")


def extract_gsm8k(text: str, policy: ExtractionPolicy = "strict") -> str | None:
    """The answer of a GSM8K response or gold text, without grouping, currency, percent sign and unit; or None.

    The answer behind `####` is the number that opens the rest of that line (or the next line that is not empty):
    signs, decimals, fractions, currency and markup may surround it, a unit may follow, other numbers may not. With
    several markers the last one counts, even when nothing stands behind it.
    Extraction is idempotent: what was extracted is extracted from itself by `flexible`.
    """
    check_policy(policy)
    if policy == "boxed":
        content = extract_boxed(text)
        if content is None:
            return None
        quantity = parse_quantity(content)
        return content if quantity is None else quantity.literal
    marked = _behind_marker(text)
    if marked is not None or policy == "strict":
        return marked
    return last_number(text)


def count_markers(text: str, policy: ExtractionPolicy = "strict") -> int:
    """How many final answers `text` marks: boxes under `boxed`, `####` otherwise. Above 1 it is a multi-answer."""
    if policy == "boxed":
        return len(_box_spans(text)[1])
    return len(_MARKER.findall(text))


def gsm8k_reference(text: str) -> str:
    """The gold answer of a GSM8K row, for preprocessing.

    Raises:
        MissingReferenceError: there is no `####` with a number behind it.
    """
    answer = extract_gsm8k(text, "strict")
    if answer is None:
        raise MissingReferenceError(f"no number behind '####' in the gold text {text[-200:]!r}: end it with '#### N'")
    return answer


def _behind_marker(text: str) -> str | None:
    start = text.rfind("####")
    if start < 0:
        return None
    markers = [match.end() for match in _MARKER.finditer(text)]
    if not markers:
        return None
    rest = text[markers[-1] : markers[-1] + _LINE].lstrip()
    line = rest.partition("\n")[0]
    quantity = parse_quantity(line.strip())
    if quantity is not None:
        return quantity.literal
    return _opening_number(line)


def _opening_number(line: str) -> str | None:
    """The number that opens `line` when words, but no other number, follow it."""
    line = unwrapped(spelled_plainly(_TAG.sub("", line)))
    lead = _LEAD.match(line)
    line = line[lead.end() :] if lead else line
    match = NUMBER.match(line)
    if match is None:
        return None
    rest = line[match.end() :]
    quantity = quantity_of_match(match, rest)
    if quantity is None and rest[:1] and not rest[:1].isalnum() and not any(map(str.isdigit, rest)):
        quantity = quantity_of_match(match, "") if not _CONTINUES.match(rest) else None
    return None if quantity is None else quantity.literal


_TAG = re.compile(r"</?[A-Za-z]\w*>|<\|\w+\|>")
_CONTINUES = re.compile(r"\s*(?:[-+/^=<>]|\*\s|\\(?:times|cdot|pm|sqrt|pi)|or\b|and\b|to\b|\.\d)")


def last_number(text: str) -> str | None:
    """The last number of `text`, in the same spelling as `extract_gsm8k`; None when there is none."""
    digit = _LAST_DIGIT.search(text[::-1])
    if digit is None:
        return None
    text = text[: len(text) - digit.start() + _MARKS]
    for window, slack in _WINDOWS:
        if len(text) > window and (found := _last_number_of(text[-window:], slack)) is not None:
            return found
    return _last_number_of(text, 0)


def _last_number_of(text: str, slack: int) -> str | None:
    text = spelled_plainly(text)
    last = None
    for stretch in reversed([*_STRETCH.finditer(text)]):
        for last in NUMBER.finditer(text, *stretch.span()):  # noqa: B007 - the last one is meant
            pass
        if last is not None:
            break
    if last is None or last.start() < slack:
        return None
    quantity = quantity_of_match(last, "")
    if quantity is None:
        return None
    before = text[: last.end() - len(last[0].lstrip())]
    literal = quantity.literal
    if literal.startswith("-") and (before[-1:].isalnum() or before.rstrip()[-1:] in _OPERAND_END):
        return literal[1:]  # the minus subtracts: "10-5"
    return literal


_OPERAND_END = frozenset("0123456789)]}%")


def extract_boxed(text: str) -> str | None:
    """Content of the last complete box, trimmed; None when no box closes or the last one is empty.

    Any depth of braces is kept whole; a box in a box gives the outer content, and the inner one when it is all there
    is. Understood: `\\boxed{}`, `\\boxed {}`, `\\fbox{}`, `\\framebox{}`, a doubled or lost backslash, and `\\boxed 5`.
    Time is linear in the length of `text`.
    """
    spans, boxes = _box_spans(text)
    if not boxes:
        return None
    start, end = boxes[-1]
    while True:
        start, end = _trimmed(text, start, end)
        inner = spans.get(start)
        if inner is None or inner[2] != end:
            return text[start:end] or None
        start, end = inner[0], inner[1]


def whole_box(text: str) -> str | None:
    """Content of the box that `text` consists of; None when it is anything else."""
    spans, _ = _box_spans(text)
    first = spans.get(0)
    return extract_boxed(text) if first is not None and first[2] == len(text) else None


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _box_spans(text: str) -> tuple[dict[int, tuple[int, int, int]], list[tuple[int, int]]]:
    """All complete boxes, found in one pass.

    Returns:
        by the position where a box opens (start of its content, end of its content, end of the box), and the contents
        of the outermost boxes in order as (start, end).
    """
    spans: dict[int, tuple[int, int, int]] = {}
    outermost: list[tuple[int, int, int]] = []
    if "box" not in text and "oxed" not in text:
        return spans, []
    stack: list[re.Match[str] | None] = []
    for match in _BOX_TOKEN.finditer(text):
        if match["open"]:
            stack.append(match)
        elif match["left"]:
            stack.append(None)
        elif match["right"] and stack:
            opening = stack.pop()
            if opening is not None:
                spans[opening.start()] = (opening.end(), match.start(), match.end())
                while outermost and outermost[-1][0] >= opening.start():
                    outermost.pop()  # boxes inside this one
                outermost.append((opening.start(), opening.end(), match.start()))
    covered = outermost[-1][2] if outermost else 0
    bare = [match.span(1) for match in _BARE_BOX.finditer(text, covered)]
    return spans, [(start, end) for _, start, end in outermost] + bare
