"""Does an answer say the same as the gold answer: what can be decided without the symbolic verifier."""

import re
from fractions import Fraction

from rft_rewards.quantity import Quantity, parse_quantity
from rft_rewards.spelling import bare_answer, compact, plain_words, spelled_latex

MAX_SYMBOLIC_CHARACTERS = 1000
"""Longer answers are compared as text only."""

MIN_SIGNIFICANT_DIGITS = 3
"""A decimal with fewer digits never stands for a fraction without finite decimal form."""

# Powers of powers, and exponents and factorials of five digits and more, are numbers that nobody can write out.
_TOO_LARGE = re.compile(
    r"(?:\^|\*\*)\s*[({\s]*[\d.]+[)}\s]*(?:\^|\*\*|!)|(?:\^|\*\*)\s*[({\s]*-?\s*\d{5,}|\d{5,}[)}\s]*!|![)}\s]*[!^]"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_PROSE = re.compile(r"[A-Za-z]{3,}")
_MATHEMATICAL_WORDS = frozenset({"and", "sqrt", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "exp", "mod"})
_POINTS = re.compile(r"\\(?:angle|triangle|overline|overrightarrow|vec|widehat)\s*\{?\s*[A-Z]{1,4}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[a-z]*\}(?:\{[clr|]*\})?")


def quantities_match(answer: Quantity, gold: Quantity) -> bool:
    """Equality of two numbers by the package's rules for percent, units and rounding.

    Values are compared exactly. `n%` is `n/100`, and `n` where the other side has no percent sign. Two known units
    must be the same. A decimal equals a fraction without finite decimal form when it is that fraction, rounded
    correctly to the decimals given, with at least `MIN_SIGNIFICANT_DIGITS` significant digits.
    """
    if answer.unit and gold.unit and answer.unit != gold.unit:
        return False
    if _values_match(answer.value, answer.decimals, gold.value, gold.decimals):
        return True
    if answer.percent == gold.percent:
        return False
    marked, bare = (answer, gold) if answer.percent else (gold, answer)
    decimals = None if marked.decimals is None else marked.decimals + 2
    return _values_match(marked.value / 100, decimals, bare.value, bare.decimals)


def _values_match(one: Fraction, one_decimals: int | None, other: Fraction, other_decimals: int | None) -> bool:
    if one == other:
        return True
    if one_decimals is not None and other_decimals is None:
        return _rounds_to(other, one, one_decimals)
    if other_decimals is not None and one_decimals is None:
        return _rounds_to(one, other, other_decimals)
    return False


def _rounds_to(fraction: Fraction, decimal: Fraction, decimals: int) -> bool:
    rest = fraction.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest == 1:  # a finite decimal has no excuse for being rounded
        return False
    unit = Fraction(1, 10**decimals)
    return abs(decimal) >= unit * 10 ** (MIN_SIGNIFICANT_DIGITS - 1) and abs(fraction - decimal) * 2 <= unit


def quick_verdict(answer: str, gold: str) -> bool | None:
    """The verdict on a bare answer when numbers and text alone decide it; None when only mathematics can.

    Safe on any input: time is linear in the length, and nothing is evaluated.
    """
    if answer == gold:
        return bool(answer.strip())
    if len(answer) > MAX_SYMBOLIC_CHARACTERS or len(gold) > MAX_SYMBOLIC_CHARACTERS:
        return answer.strip() == gold.strip()
    answer, gold = bare_answer(answer), bare_answer(gold)
    if not answer or not gold:
        return False
    ours, theirs = parse_quantity(answer), parse_quantity(gold)
    if ours is not None and theirs is not None:
        return quantities_match(ours, theirs)
    said, wanted = plain_words(answer), plain_words(gold)
    if wanted is not None:
        return said == wanted
    spelled, target = spelled_latex(answer), spelled_latex(gold)
    if spelled and compact(spelled) == compact(target):
        return True
    return None if _is_mathematics(spelled) and not _TOO_LARGE.search(spelled) else False


def _is_mathematics(spelled: str) -> bool:
    """Whether there is anything to evaluate: no prose, and at least a digit, a letter or a command."""
    bare = _COMMAND.sub(" ", _POINTS.sub(" ", _ENVIRONMENT.sub(" ", spelled)))
    if any(word.lower() not in _MATHEMATICAL_WORDS for word in _PROSE.findall(bare)):
        return False
    return any(map(str.isalnum, bare)) or "\\" in spelled
