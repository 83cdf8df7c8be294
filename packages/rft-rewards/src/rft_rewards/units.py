"""Units behind a number: which words are one, and which two are the same."""

import re

SCALES = {
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}

_SPELLINGS = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "dm": "dm decimeter decimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "inch": "in inch inche",
    "foot": "ft foot feet",
    "yard": "yd yard",
    "mile": "mi mile",
    "mg": "mg milligram",
    "g": "g gram",
    "kg": "kg kilogram kilo",
    "ounce": "oz ounce",
    "pound": "lb pound",
    "ton": "ton tonne",
    "ml": "ml mL milliliter millilitre",
    "l": "l L liter litre",
    "gallon": "gal gallon",
    "second": "s sec second",
    "minute": "min minute",
    "hour": "h hr hour",
    "day": "day",
    "week": "week wk",
    "month": "month",
    "year": "yr year",
    "mph": "mph",
    "km/h": "kmh kph km/h km/hr",
    "m/s": "m/s",
    "hz": "Hz",
    "degree": "degree deg circ",
    "radian": "radian rad",
    "cent": "cent",
    "dollar": "dollar USD buck",
    "euro": "euro EUR",
    "pound sterling": "GBP",
    "yen": "yen JPY",
    "rupee": "rupee INR",
    "dozen": "dozen",
    "watt": "W watt",
    "joule": "J joule",
    "newton": "N newton",
    "volt": "V volt",
}
_CANONICAL = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}
CURRENCIES = {"$": "dollar", "\u20ac": "euro", "\u00a5": "yen", "\u20b9": "rupee", "\u00a3": "pound sterling"}

_NO_UNIT = frozenset(
    # words of arithmetic and logic: what they follow is not the whole answer
    """or and but not if to plus minus times over than is are was equals equal mod modulo squared cubed half halves
    third thirds quarter quarters fourth fourths fifth fifths sixth sixths eighth eighths tenth tenths hundredth
    hundredths hundred pi sqrt sin cos tan cot sec csc log ln exp frac choose inf infinity infty factorial point
    maybe perhaps approximately about through until between""".split()  # noqa: SIM905
)
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_GLUE = frozenset({"of", "per", "in", "a", "an", "the", "each", "every", "for"})
_WRAPPED = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox|operatorname|rm|hbox)\s*\{([^{}]*)\}")
_EXPONENT = re.compile(r"\s*(?:\^\s*\{?\s*([23])\s*\}?|([\u00b2\u00b3])|(?<=[a-z])([23]))(?=$|[\s./])")
_CIRCLE = re.compile(r"\^?\s*\{?\s*\\circ\s*\}?\s*|\^?\s*\\degrees?\b")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*(?:/[A-Za-z]+)?")


def unit_name(tail: str, *, set_off: bool) -> str | None:
    """Name of the unit that `tail`, the text behind a number, spells.

    Args:
        tail: everything behind the number; LaTeX wrappers such as `\\text{}` are looked through.
        set_off: a space or wrapper stands between number and tail; without it only units of the fixed list count.

    Returns:
        "" when the tail is empty or holds only words that are not in the fixed list, the unit's one name (with `^2`
        or `^3` for areas and volumes) when it is in the list, None when the tail is no unit at all.
    """
    if "\\" in tail:
        tail, wrappers = _WRAPPED.subn(r" \1 ", tail)
        set_off = set_off or wrappers > 0
        tail, circles = _CIRCLE.subn(" degree ", tail)
        set_off = set_off or circles > 0
        tail = tail.replace("\\ ", " ").replace("\\,", " ")
    exponent = ""
    found = _EXPONENT.search(tail)
    if found is not None:
        exponent = "^" + next(part for part in found.groups() if part).translate({0xB2: "2", 0xB3: "3"})
        tail = tail[: found.start()] + " " + tail[found.end() :]
    words = tail.replace(".", " ").split()
    if not words:
        return None if exponent else ""
    return _unit_of_words(words, exponent, set_off=set_off)


def _unit_of_words(words: list[str], exponent: str, *, set_off: bool) -> str | None:
    if len(words) > 8 or not all(_WORD.fullmatch(word) for word in words):
        return None
    if any(word.lower() in _NO_UNIT for word in words):
        return None
    power = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}.get(words[0].lower())
    if power is not None and len(words) > 1:
        words, exponent = words[1:], power
    name = _canonical(words[0])
    if name is not None:
        return name + exponent if len(words) == 1 else ""
    if not set_off or len(words[0]) < 3 or words[0].lower() in _ALPHABET:  # abc, xyz: a product of variables
        return "" if words[0].lower() in _GLUE and set_off and len(words) > 1 else None
    return ""


def _canonical(word: str) -> str | None:
    for spelling in (word, word.lower()):
        for form in (spelling, spelling.removesuffix("s")):
            if form in _CANONICAL:
                return _CANONICAL[form]
    return None
