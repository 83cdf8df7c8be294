"""The outer form of an answer: list, set, tuple or interval, plus-minus, number in a base, assignment."""

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["single", "list", "set", "tuple", "base"]

_BASE = re.compile(r"\(?\s*([0-9A-Fa-f]+)\s*\)?\s*_\s*\{?\s*(?:\\text\s*\{)?\s*(\d+)\s*\}?\s*\}?")
_SEPARATOR = re.compile(r",|;|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
_NAME = re.compile(
    r"(?:\\angle\s*|m\s*\\angle\s*)?(?:[A-Za-z]{1,3}|\\[a-z]+)(?:_\{?\w+\}?)?(?:\s*\(\s*[a-z](?:\s*,\s*[a-z])*\s*\))?"
    r"|\(\s*[a-z](?:\s*,\s*[a-z])*\s*\)"
)


@dataclass(frozen=True, slots=True)
class Form:
    """An answer taken apart at its outermost level.

    Attributes:
        kind: `single` for anything that is not one of the others; `list` is written without brackets.
        items: the elements; of a `base` its digits and base; of a `single` itself.
        brackets: the two outer brackets of a `tuple`, which tell open and closed intervals apart.
    """

    kind: Kind
    items: tuple[str, ...]
    brackets: str = ""


def form_of(text: str) -> Form:
    """The outer form of `text`, which is spelled by `spelled_latex`."""
    text = text.strip()
    base = _BASE.fullmatch(text)
    if base is not None:
        return Form("base", (base[1].upper(), base[2]))
    if text.startswith("\\{") and text.endswith("\\}"):
        return Form("set", _signed_items(split_list(text[2:-2])))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _spans(text):
        inside = split_list(text[1:-1])
        if len(inside) > 1:
            return Form("tuple", tuple(inside), text[0] + text[-1])
    items = _signed_items(split_list(text))
    return Form("list", items) if len(items) > 1 else Form("single", (text,))


def split_list(text: str) -> list[str]:
    """`text` split at the commas, semicolons, `and` and `or` outside of every bracket and environment."""
    if "\\begin" in text:
        return [text]
    depth, start, parts = 0, 0, []
    position = 0
    while position < len(text):
        character = text[position]
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif depth == 0 and (match := _SEPARATOR.match(text, position)) is not None:
            parts.append(text[start:position].strip())
            position = start = match.end()
            continue
        position += 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def assigned_value(text: str) -> tuple[str, str] | None:
    """(name, value) of an assignment such as `x = 5`, `f(x) = x^2` or `\\angle ABC = 55`; None for anything else."""
    name, sign, value = text.partition("=")
    if not sign or "=" in value or name.rstrip()[-1:] in ("<", ">", "!", "\\"):
        return None
    name = name.strip()
    return (name, value.strip()) if value.strip() and _NAME.fullmatch(name) else None


def _signed_items(items: list[str]) -> tuple[str, ...]:
    """Elements with every `a \\pm b` written as its two values."""
    spread: list[str] = []
    for item in items:
        if item.count("\\pm") == 1:
            head, _, tail = item.partition("\\pm")
            spread += [f"{head} + {tail}" if head.strip() and not head.rstrip().endswith("=") else f"{head}{tail}"]
            spread += [f"{head} - {tail}"]
        else:
            spread.append(item)
    return tuple(item.strip() for item in spread)


def _spans(text: str) -> bool:
    """Whether the bracket that opens `text` is closed by the one that ends it."""
    depth = 0
    for position, character in enumerate(text):
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
            if depth == 0:
                return position == len(text) - 1
    return False
