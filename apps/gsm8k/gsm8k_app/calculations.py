"""Partial credit: which of a gold answer's calculations a response gets right."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence

from rft_rewards import RewardSample, Score

_MARK = re.compile(r"<<[^<>=]*=([^<>=]*)>>")
_RESULT = re.compile(r"=\s*\$?\s*(-?[\d,]*\.?\d+)")
_END = re.compile(r"[=;:?!\n]|[.,](?=\s|$)")
_WORD = re.compile(r"/\s*[^\W\d_]+|[^\W\d_]{2,}|(?!x)[^\W\d_]")
_CALCULATION = re.compile(r"[\d(][\d.()+*/%\s-]*$")
_SIGNS = str.maketrans({"x": "*", "\u00d7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-", "$": None, ",": None})
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST = 96
"""Characters in front of a result in which its calculation is looked for."""


def right_calculations(samples: Sequence[RewardSample]) -> list[Score]:
    """Share of the gold answer's calculations, 0 to 1, whose result stands in the response behind a right equation.

    The gold answer is GSM8K's own text, whose calculator marks `<<48/2=24>>` hold them; one without any scores 0.
    An equation counts once, so repeating one earns nothing, and a result that is only claimed earns nothing.
    """
    return [Score(value=_share(sample.response, sample.reference or "")) for sample in samples]


def _share(response: str, gold: str) -> float:
    wanted = Counter(value for value in map(_number, _MARK.findall(gold)) if value is not None)
    if not wanted:
        return 0.0
    return (wanted & Counter(_results(response))).total() / wanted.total()


def _results(text: str) -> list[float]:
    """Results of the different right equations of a text."""
    found: dict[tuple[str, float], None] = {}
    for equals in _RESULT.finditer(text):
        left = _left_side(text[max(0, equals.start() - _LONGEST) : equals.start()])
        claimed, value = _number(equals[1]), _evaluated(left)
        # A result may be rounded to cents.
        if claimed is not None and value is not None and abs(value - claimed) < 0.0051:
            found[left, claimed] = None
    return [claimed for _, claimed in found]


def _left_side(text: str) -> str:
    """The calculation at the end of a text, without units and spaces."""
    clause = _WORD.sub(" ", _END.split(text)[-1]).translate(_SIGNS)
    # Two numbers side by side: the first belongs to the words before.
    found = _CALCULATION.search(re.split(r"(?<=[\d)%])\s+(?=[\d(])", clause.strip())[-1])
    return "" if found is None else re.sub(r"\s", "", found[0])


def _number(text: str) -> float | None:
    try:
        return round(float(text.replace(",", "").replace("$", "").strip()), 2)
    except ValueError:
        return None


def _evaluated(text: str) -> float | None:
    """Value of the four operations on numbers; None for anything else, and for a number alone."""
    try:
        tree = ast.parse(text.replace("%", "/100"), mode="eval").body
        return _value(tree) if isinstance(tree, ast.BinOp) else None
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return None


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))
