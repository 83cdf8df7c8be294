"""Numbers as people and models write them, read exactly.

The rules, each tested by name:

* Thousands are grouped by a comma, `{,}`, `\\,`, `,\\!` or a thin space, three digits to a group. A comma is never a
  decimal sign; `1,5` is a list.
* A currency sign and `%` are marks on a number. A percentage stands for its number of percent and for its value.
* A bar over the last decimals repeats them: `0.1\\overline{6}` is 1/6.
* A unit is words behind the number, set off by a space or one of a fixed list (`12cm`); words that do arithmetic
  (`and`, `or`, `half`, `squared`, ...) are no unit. Units are not converted.
* `thousand`, `million`, `billion`, `trillion` scale the number; `dozen` is a unit.
* Values are `fractions.Fraction`, never floats.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from rft_rewards.plain_text import plain_characters
from rft_rewards.units import CURRENCIES, SCALES, unit_name

MAX_DIGITS = 1000
"""Longer numbers are compared as text only: converting them costs quadratic time."""

_PLAIN = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)", re.ASCII)
_LATEX_FRACTION = re.compile(
    r"(\d\s*)?\\[dtc]?frac\s*(?:\{\s*([-+]?\d*\.?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d*\.?\d+)\s*\}|(\d)(?!\d))", re.ASCII
)
_REPEATING = re.compile(r"(?<![\d.,])(\d{1,20})\.(\d{0,20})\\overline\s*\{(\d{1,20})\}", re.ASCII)
_GROUPED = re.compile(
    r"(?<![\d.,])\d{1,3}(?:(?:,\\!\s?|\{,\}|\\,|\u2009|,)\d{3}){1,40}(?!\d|,\d|,\\!|\{,\}|\\,\d)", re.ASCII
)
_NOT_DIGIT = re.compile(r"\D+", re.ASCII)
_DECIMAL = r"(?:\d+(?:\.\d+)?|\.\d+)"
_EXPONENT = (
    r"(?:[eE](?P<e>[-+]?\d{1,4})(?![\d.\w])"
    r"|\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*\{?\s*(?P<ten>[-+]?\d{1,4})(?!\d)\s*\}?)"
)
NUMBER = re.compile(
    r"(?=[-+$.\d\u00a3\u20ac\u00a5\u20b9ACHNU])"  # most characters start no number: fail at once
    r"(?P<sign>[-+]?)\s?(?P<currency>(?:US|A|C|NZ|HK)?\$|[\u00a3\u20ac\u00a5\u20b9])?\s?(?P<inner>[-+]?)"
    rf"(?:(?P<whole>\d+)\s+(?P<up>\d+)\s?/\s?(?P<down>\d+)(?![\d/.])"
    rf"|(?P<over>{_DECIMAL})\s?/\s?(?P<under>-?{_DECIMAL})(?![\d/])"
    rf"|(?P<decimal>{_DECIMAL}){_EXPONENT}?)"
    r"(?P<scale>\s+(?i:thousand|million|billion|trillion)\b)?"
    r"(?P<percent>\s?%|\s+(?i:per\s?cent)\b)?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its marks.

    Attributes:
        value: the exact value, scale words applied, the percent sign not.
        literal: the number without currency, grouping, percent sign and unit, e.g. `48500.00`, `-3/4`, `1 1/2`.
        percent: a percent sign follows.
        unit: a unit of the fixed list, or "".
        decimals: digits behind the decimal point when written as a plain decimal, else None.
    """

    value: Fraction
    literal: str
    percent: bool = False
    unit: str = ""
    decimals: int | None = None


def spelled_plainly(text: str) -> str:
    """`text` with plain characters, numeric LaTeX fractions as `a/b`, and thousands ungrouped."""
    text = plain_characters(text)
    if "\\" in text:
        text = _REPEATING.sub(_repeating_fraction, text)
        text = _LATEX_FRACTION.sub(_slashed, text.replace("\\$", "$").replace("\\%", "%"))
    if "," in text or "\u2009" in text or "\\," in text:
        text = _GROUPED.sub(lambda match: _NOT_DIGIT.sub("", match[0]), text)
    return text


def _repeating_fraction(match: re.Match[str]) -> str:
    whole, fixed, period = match.groups()
    over = int(whole + fixed + period) - int(whole + fixed)
    return f"{over}/{10 ** len(fixed) * (10 ** len(period) - 1)}"


def _slashed(match: re.Match[str]) -> str:
    whole, over, digit, under, last = match.groups()
    fraction = f"{over or digit}/{under or last}"
    return f"{whole.strip()} {fraction}" if whole else fraction


def parse_quantity(text: str) -> Quantity | None:
    """The one number that `text` consists of, with its marks; None when it is anything else.

    Wrappers are looked through: `$...$`, `\\(...\\)`, `**...**`, a trailing full stop.
    """
    if len(text) > MAX_DIGITS:
        return None
    if _PLAIN.fullmatch(text):
        return _plain_quantity(text)
    text = unwrapped(spelled_plainly(text))
    match = NUMBER.match(text)
    if match is None:
        return None
    return quantity_of_match(match, text[match.end() :])


def _plain_quantity(text: str) -> Quantity:
    text = text.removeprefix("+")
    whole, point, digits = text.partition(".")
    if not point:
        return Quantity(Fraction(int(text)), text)
    return Quantity(Fraction(int(whole + digits), 10 ** len(digits)), text, decimals=len(digits))


def quantity_of_match(match: re.Match[str], tail: str) -> Quantity | None:
    """Quantity of a match of `NUMBER` with `tail` behind it; None when the tail is no unit or the number no value."""
    parts = match.groupdict()
    if parts["sign"] and parts["inner"]:
        return None
    unit = unit_name(tail, set_off=tail[:1].isspace() or bool(parts["percent"] or parts["currency"]))
    if unit is None:
        return None
    if parts["currency"] and not unit:
        unit = CURRENCIES[parts["currency"][-1]]
    sign = "-" if "-" in (parts["sign"], parts["inner"]) else ""
    if len(match[0]) > MAX_DIGITS and sum(character.isdigit() for character in match[0]) > MAX_DIGITS:
        return None
    read = _unsigned(parts)
    if read is None:
        return None
    value, literal, decimals = read
    scale = (parts["scale"] or "").strip().lower()
    if scale:
        value *= SCALES[scale]
        literal, decimals = str(value), None
    value = -value if sign else value
    return Quantity(value, sign + literal, bool(parts["percent"]), unit, decimals)


def _unsigned(parts: dict[str, str | None]) -> tuple[Fraction, str, int | None] | None:
    if (decimal := parts["decimal"]) is not None:
        exponent = parts["e"] or parts["ten"]
        if exponent is None:
            plain = _plain_quantity(decimal)
            return plain.value, decimal, plain.decimals
        if abs(int(exponent)) > MAX_DIGITS:
            return None
        return Fraction(decimal) * Fraction(10) ** int(exponent), f"{decimal}e{int(exponent)}", None
    over, under = Fraction(parts["over"] or parts["up"] or 0), Fraction(parts["under"] or parts["down"] or 0)
    if under == 0:
        return None
    if (whole := parts["whole"]) is not None:
        return int(whole) + over / under, f"{whole} {parts['up']}/{parts['down']}", None
    return over / under, f"{parts['over']}/{parts['under']}", None


_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("`", "`"))
_TEXT_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed|displaystyle)\s*\{([^{}]*)\}")


def unwrapped(text: str) -> str:
    """`text` without the delimiters and punctuation that may surround an answer; idempotent."""
    before = None
    while text != before:
        before = text
        text = text.strip().lstrip("=").rstrip(",;:").strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for opening, closing in _WRAPPERS:
            if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
                inner = text[len(opening) : -len(closing)]
                if opening not in inner or opening in ("\\(", "\\["):
                    text = inner
                    break
        if (match := _TEXT_WRAPPER.fullmatch(text)) is not None:
            text = match[1]
    return text
