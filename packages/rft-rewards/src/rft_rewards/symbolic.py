"""The symbolic verifier: math-verify on the parts of an answer. Imported in worker processes only."""

import logging
from typing import Any

import sympy  # type: ignore[import-untyped]
from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

from rft_rewards.matching import quick_verdict
from rft_rewards.spelling import bare_answer, compact, spelled_latex
from rft_rewards.structure import Form, assigned_value, form_of

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_LATEX = (LatexExtractionConfig(),)
_ANYWHERE = (LatexExtractionConfig(), ExprExtractionConfig())


def grade(pair: tuple[str, str]) -> bool:
    """Whether a bare answer says the same as the bare gold answer; `pair` is (answer, gold)."""
    answer, gold = pair
    return _same(spelled_latex(bare_answer(answer)), spelled_latex(bare_answer(gold)))


def read(pair: tuple[str, str]) -> tuple[str | None, bool]:
    """What math-verify finds in a response, as text, and whether it is the gold answer; `pair` is (response, gold)."""
    response, gold = pair
    found = parse(response, _ANYWHERE, parsing_timeout=None)
    if not found:
        return None, False
    wanted = parse(f"${spelled_latex(bare_answer(gold))}$", _LATEX, parsing_timeout=None)
    return str(found[0]), bool(verify(wanted, found, timeout_seconds=None))


def _same(answer: str, gold: str) -> bool:
    ours, theirs = form_of(answer), form_of(gold)
    if ours.kind == theirs.kind == "single":
        return _same_single(answer, gold)
    if "base" in (ours.kind, theirs.kind):
        return ours == theirs
    unordered = {"list", "set"}
    if ours.kind in unordered and theirs.kind in unordered:
        return _same_elements(ours, theirs)
    if ours.kind == theirs.kind == "tuple":
        return ours.brackets == theirs.brackets and _same_in_order(ours, theirs)
    if {ours.kind, theirs.kind} == {"set", "tuple"}:
        return False
    if "single" in (ours.kind, theirs.kind):
        return _same_named(answer, gold) if "=" in answer or "=" in gold else _verified(answer, gold)
    return False  # a bare list against a tuple: the order is not said


def _same_in_order(ours: Form, theirs: Form) -> bool:
    return len(ours.items) == len(theirs.items) and all(map(_same_leaf, ours.items, theirs.items))


def _same_elements(ours: Form, theirs: Form) -> bool:
    answers, golds = _unnamed(ours.items), _unnamed(theirs.items)
    if len(answers) != len(golds):
        return False
    for answer in answers:
        found = next((index for index, gold in enumerate(golds) if _same_leaf(answer, gold)), None)
        if found is None:
            return False
        del golds[found]
    return True


def _unnamed(items: tuple[str, ...]) -> list[str]:
    """Values of `x = 1, x = -2` when every element, or only the first, names the same variable; else the items."""
    pairs = [assigned_value(item) for item in items]
    names = {pair[0] for pair in pairs if pair is not None}
    if len(names) == 1 and (None not in pairs or pairs[0] is not None):
        return [item if pair is None else pair[1] for item, pair in zip(items, pairs, strict=True)]
    return list(items)


def _same_leaf(answer: str, gold: str) -> bool:
    quick = quick_verdict(answer, gold)
    return _same(answer, gold) if quick is None else quick


def _same_single(answer: str, gold: str) -> bool:
    if "=" in answer or "=" in gold:
        return _same_named(answer, gold)
    return _verified(answer, gold)


def _same_named(answer: str, gold: str) -> bool:
    """Equations: an assignment against a bare value, two assignments to one name, or anything else by math-verify."""
    ours, theirs = assigned_value(answer), assigned_value(gold)
    if ours is not None and theirs is not None and compact(ours[0]) == compact(theirs[0]):
        return _same_leaf(ours[1], theirs[1])
    if ours is not None and "=" not in gold:
        return _same_leaf(ours[1], gold)
    if theirs is not None and "=" not in answer:
        return _same_leaf(answer, theirs[1])
    return "=" in answer and "=" in gold and _verified(answer, gold)


def _verified(answer: str, gold: str) -> bool:
    wanted, said = _parsed(gold), _parsed(answer)
    return bool(verify(wanted, said, timeout_seconds=None, allow_set_relation_comp=True))


def _parsed(text: str) -> list[Any]:
    return [_with_imaginary_unit(item) for item in parse(f"${text}$", _LATEX, parsing_timeout=None)]


def _with_imaginary_unit(item: Any) -> Any:
    """math-verify reads `i` as a symbol: without this `(1+i)^2` and `2i` differ."""
    symbols = {symbol for symbol in getattr(item, "free_symbols", ()) if symbol.name == "i"}
    return item.subs(dict.fromkeys(symbols, sympy.I)) if symbols else item


_verified("x", "y")  # builds the parser's tables before the first limit runs
