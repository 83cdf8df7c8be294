"""Rewrites of gold answers for `rewards.py`: spellings that keep the value and changes that do not.

They were written down before a verifier was run on them, from what models write; each kind has a name in the report.
"""

import re
from collections.abc import Iterator
from fractions import Fraction

SPELLINGS = 20
CHANGES = 10

_WIDE = str.maketrans("0123456789-", "\uff10\uff11\uff12\uff13\uff14\uff15\uff16\uff17\uff18\uff19\u2212")
_INTEGER = re.compile(r"(?<![A-Za-z\\\d.])\d+(?![\d.])")
_SIMPLE_FRACTION = re.compile(r"\\d?frac\{(-?\d+)\}\{(\d+)\}")


def gsm8k_spellings(number: int) -> Iterator[tuple[str, str]]:
    """20 endings of a response that give `number`, as (kind, text)."""
    grouped = f"{number:,}"
    sign, digits = ("-" if number < 0 else ""), str(abs(number))
    yield "commas", f"#### {grouped}"
    yield "no commas", f"#### {number}"
    yield "no space", f"####{number}"
    yield "next line", f"####\n{number}\n"
    yield "decimals", f"#### {grouped}.00"
    yield "full stop", f"#### {grouped}."
    yield "dollar", f"#### {sign}${grouped.lstrip('-')}"
    yield "escaped dollar", f"#### \\${number}"
    yield "percent", f"#### {number}%"
    yield "unit", f"#### {grouped} dollars"
    yield "unit and sentence", f"#### {number} apples are left.\n\nI hope this helps!"
    yield "bold", f"#### **{grouped}**"
    yield "mathematics", f"#### ${number}$"
    yield "box", f"#### \\boxed{{{grouped}}}"
    yield "wide digits", f"#### {str(number).translate(_WIDE)}"
    yield "fraction", f"#### {2 * number}/2"
    yield "LaTeX fraction", f"#### {sign}\\frac{{{3 * abs(number)}}}{{3}}"
    yield "power of ten", f"#### {sign}{digits[0]}.{digits[1:] or '0'} \\times 10^{{{len(digits) - 1}}}"
    yield "LaTeX commas", f"#### {grouped.replace(',', '{,}')}"
    yield "thin spaces", f"#### {grouped.replace(',', chr(0x202F))}\nThat is the answer, as asked in step one."


def gsm8k_changes(number: int) -> Iterator[tuple[str, str]]:
    """10 endings of a response that give another number."""
    other = number if number else 7
    digits = str(abs(number))
    yield "one more", f"#### {number + 1:,}"
    yield "one less", f"#### {number - 1}"
    yield "other sign", f"#### {-other}"
    yield "ten times", f"#### {other * 10:,}"
    yield "a tenth", f"#### ${Fraction(other, 10).numerator}/{Fraction(other, 10).denominator}"
    yield "half more", f"#### {number}.5"
    yield "digit before", f"#### 1{digits}" if number >= 0 else f"#### -1{digits}"
    yield "other box", f"#### \\boxed{{{number + 100:,}}}"
    yield "alternatives", f"#### {number} or {number + 2}"
    yield "answer only before the mark", f"So it is {number}.\n#### {number + 3} dollars"


def math_spellings(gold: str) -> list[tuple[str, str]]:
    """20 spellings of a MATH gold answer with the same meaning, as (kind, text), without the gold spelling itself."""
    inner = list(dict.fromkeys((kind, text) for kind, text in _inner_spellings(gold) if text != gold))
    outer = list(_wrappings(gold))
    found = inner + outer
    combined = ((f"{kind}, {wrapped}", text) for kind, base in inner for wrapped, text in _wrappings(base))
    plain = ((f"{kind}, spaces", text) for kind, base in outer for text in (f" {base} ", f"{base}\n", f"\t{base}"))
    for pair in (*combined, *plain):
        if len(found) >= SPELLINGS:
            break
        found.append(pair)
    return found[:SPELLINGS]


def _wrappings(text: str) -> Iterator[tuple[str, str]]:
    yield "box", f"\\boxed{{{text}}}"
    yield "dollars", f"${text}$"
    yield "parentheses", f"\\({text}\\)"
    yield "full stop", f"{text}."
    yield "dollars and full stop", f"${text}$."
    yield "bold", f"**{text}**"
    yield "equals sign", f"= {text}"
    yield "answer is", f"The answer is ${text}$"


def _inner_spellings(gold: str) -> Iterator[tuple[str, str]]:
    words = re.fullmatch(r"\\text\{([^{}]*)\}", gold)
    if words is not None:
        yield "words", words[1]
        yield "bold words", f"\\textbf{{{words[1]}}}"
        yield "roman words", f"\\mathrm{{{words[1]}}}"
        yield "case", f"\\text{{{words[1].upper()}}}"
        return
    yield "dfrac", gold.replace("\\frac", "\\dfrac") if "\\dfrac" not in gold else gold.replace("\\dfrac", "\\frac")
    yield "tfrac", re.sub(r"\\d?frac", r"\\tfrac", gold)
    yield "slash", re.sub(r"\\d?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", gold) if not re.match(r"\d", gold) else gold
    yield (
        "doubled fraction",
        _SIMPLE_FRACTION.sub(lambda match: f"\\frac{{{2 * int(match[1])}}}{{{2 * int(match[2])}}}", gold),
    )
    yield "tight", re.sub(r"\s*([-+=,&<>()\[\]|])\s*", r"\1", gold) if "\\begin" not in gold else gold
    yield "loose", re.sub(r"(?<=[^\s{^_(\[,\\&/])([-+=])(?=[^\s])", r" \1 ", gold)
    yield (
        "left and right",
        re.sub(r"(?<!\\left)\(", r"\\left(", re.sub(r"(?<!\\right)\)", r"\\right)", gold))
        if (gold.count("(") == gold.count(")") and "[" not in gold and "]" not in gold and "text" not in gold)
        else gold,
    )
    yield "no left and right", gold.replace("\\left", "").replace("\\right", "")
    yield "brackets of a matrix", gold.replace("pmatrix", "bmatrix")
    yield "decimals", f"{gold}.0" if re.fullmatch(r"-?\d{1,3}", gold) else gold
    yield "commas", re.sub(r"^(-?\d{1,3})(\d{3})$", r"\1,\2", gold)
    yield (
        "no commas",
        re.sub(r"(?<=\d),(?:\\!)? ?(?=\d{3}(?!\d))", "", gold) if re.match(r"[\d$\\]+[,\d]", gold) else gold,
    )
    yield "thin space", gold.replace(", ", ",\\,").replace(" \\", "\\,\\")
    yield "degrees braced", gold.replace("^\\circ", "^{\\circ}")
    yield "degrees left out", gold.replace("^\\circ", "")
    yield "degree sign", gold.replace("^\\circ", "\u00b0")
    yield "unit left out", re.sub(r"\s*\\(?:text|mbox)\{ ?[a-z]+\}(?:\^2)?$", "", gold)
    yield "dollar left out", gold.replace("\\$", "")
    yield "pi", gold.replace("\\pi", "\u03c0")
    yield "root", re.sub(r"\\sqrt\{(\d+)\}|\\sqrt(\d)", lambda match: f"\u221a{match[1] or match[2]}", gold)
    yield "braced root", re.sub(r"\\sqrt(\d)", r"\\sqrt{\1}", gold)
    yield "minus", gold.replace("-", "\u2212")
    yield "infinity", gold.replace("\\infty", "\u221e")
    yield "union", gold.replace("\\cup", "\u222a")
    yield "braced base", re.sub(r"_(\d)$", r"_{\1}", gold)
    yield "display style", f"\\displaystyle {gold}"
    yield "named", f"x = {gold}" if re.fullmatch(r"-?\d+|-?\\frac\{\d+\}\{\d+\}", gold) else gold
    yield "braces", f"{{{gold}}}" if re.fullmatch(r"[-\d.]+|[-\dpi\\ ]*\\sqrt\{\d+\}", gold) else gold


def math_changes(gold: str) -> list[tuple[str, str]]:
    """10 answers that mean something else than the gold answer."""
    words = re.fullmatch(r"\\text\{(.*)\}", gold)
    candidates = _word_changes(words[1]) if words is not None else _changes(gold)
    found: dict[str, str] = {}
    for kind, text in candidates:
        if text != gold and text not in found and not _same_number(text, gold):
            found[text] = kind
    return [(kind, text) for text, kind in found.items()][:CHANGES]


def _same_number(one: str, other: str) -> bool:
    try:
        return Fraction(_as_fraction(one)) == Fraction(_as_fraction(other))
    except (ValueError, ZeroDivisionError):
        return False


def _as_fraction(text: str) -> str:
    text = re.sub(r"^-\((.*)\)$", r"-\1", text).replace("--", "")
    return _SIMPLE_FRACTION.sub(r"\1/\2", text)


def _word_changes(word: str) -> Iterator[tuple[str, str]]:
    others = ["A", "B", "C", "D", "E"] if word.startswith("(") else ["Maria", "odd", "north", "parabola", "Nobody"]
    name = word.strip("()")
    yield from (("other word", f"\\text{{{other}}}") for other in others if other.lower() != name.lower())
    yield "alternatives", f"{name} or {others[0] if others[0] != name else others[1]}"
    yield "denial", f"not {name}"
    yield "list", f"{name}, {others[-1] if others[-1] != name else others[0]}"
    yield "part", f"\\text{{{name}{name}}}"
    yield "number", "1"
    yield "sentence", f"the answer is not {name}"
    yield "nothing", "\\text{}"


def _changes(gold: str) -> Iterator[tuple[str, str]]:
    places = [match.span() for match in _INTEGER.finditer(gold)]
    for start, end in dict.fromkeys((places[:1] + places[-1:]) if places else []):
        number = int(gold[start:end])
        for change in (number + 1, number + 10, number * 10 + 3, number + 2):
            yield "other digits", f"{gold[:start]}{change}{gold[end:]}"
    simple = not re.search(r"[=,<>&]|\\pm|\\in|\\cup|_|\\text|\\mbox|\\\$|\^\\circ", gold)
    if simple:
        yield "other sign", f"-({gold})" if gold != "0" else "-1"
        yield "one more", f"{gold} + 1"
        yield "twice", f"2({gold})" if gold != "0" else "2"
        yield "half", f"\\frac{{{gold}}}{{2}}" if gold != "0" else "\\frac{1}{2}"
        yield "third power", f"({gold})^3" if gold not in ("0", "1", "-1") else "8"
        yield "unknown", "x_1"
    yield "two answers", f"{gold}, 977"
    yield "first of a list", gold.partition(",")[0] if re.fullmatch(r"[-\d ]+(,[-\d ]+)+", gold) else f"{gold} or 977"
    yield (
        "open and closed",
        gold.translate(str.maketrans("()[]", "[](]")) if "infty" not in gold and "\\cup" in gold else "977",
    )
    yield "denial", f"not {gold}"
    yield "no answer", "\\text{none}"
    yield "question mark", "?"
    yield "sentence", "I do not know"
    yield "zero", "0" if gold != "0" else "1"
