"""One spelling for the many ways to write the same LaTeX, so that equal answers are equal text as often as possible.

Nothing is evaluated here. What stays different goes to the symbolic verifier, in this spelling.
"""

import re

from rft_rewards.extraction import whole_box
from rft_rewards.plain_text import plain_characters
from rft_rewards.quantity import spelled_plainly, unwrapped
from rft_rewards.units import SCALES, unit_name

_SYMBOLS = {
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2260": r"\ne ",
    "\u00b1": r"\pm ",
    "\u2213": r"\mp ",
    "\u00f7": "/",
    "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ",
    "\u2217": r"\cdot ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2208": r"\in ",
    "\u03b8": r"\theta ",
    "\u2220": r"\angle ",
    "\u2192": r"\to ",
}
_SYMBOL = re.compile("[" + "".join(_SYMBOLS) + "]")
_SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b\u207f]+")
_RAISED = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207f", "0123456789-n")
_ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|\\{([^{}]*)\\}|(\\d+|[a-z]))")
_LAYOUT = re.compile(
    r"(?<!\\)\\(?:left|right|displaystyle|textstyle|limits|nolimits|big[lrg]?|Big[lrg]?)(?![A-Za-z])\.?"
    r"|(?<!\\)\\[!,;:> ]|(?<!\\)\\(?:quad|qquad)(?![A-Za-z])|~|\u2009"
)
_TEXT = re.compile(
    r"\\(?:text|textrm|textbf|textit|textsf|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname|bf|rm|emph)\s*\{([^{}]*)\}"
)
_SHORT_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9a-z])|\\frac\s*([0-9])\s*(?=\{)")
_BRACED_FRACTION = re.compile(r"(\\frac\s*\{[^{}]*\})\s*([0-9])")
_OVER = re.compile(r"\{([^{}]+?)\s*\\over(?![A-Za-z])\s*([^{}]+?)\}")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-z])")
_CALLED_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![A-Za-z])")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_ANGLE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![A-Za-z]))")
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_NAMES = re.compile(r"(?<![\\A-Za-z])(pi|infty|theta|sin|cos|tan|cot|log|ln)(?![A-Za-z])")
_SINGLE = re.compile(r"\{\s*([0-9A-Za-z])\s*\}")
_SPACES = re.compile(r"\s+")
_LEAD = re.compile(r"(?i)^(?:the\s+)?(?:final\s+)?answer\s*(?:is|:|=)\s*:?\s*")
_ASIDE = re.compile(r"\s*\((?:or\s+)?[A-Za-z][A-Za-z' -]*\)$")
_UNIT_TAIL = re.compile(
    r"(?<=[\d}\)a-z])\s*(\\(?:text|mbox|mathrm|textrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?\s*[23]\s*\}?)?)\s*$"
)

_SCALE = re.compile(r"(\d)\s*(thousand|million|billion|trillion)(?![A-Za-z])", re.IGNORECASE)

WORDS = re.compile(r"[A-Za-z][A-Za-z'-]*(?:\s+[A-Za-z][A-Za-z'-]*)*")


def bare_answer(text: str) -> str:
    """`text` without "the answer is", without delimiters around it and without a box around it."""
    text = _LEAD.sub("", unwrapped(text), count=1)
    if "box" in text and (content := whole_box(text)) is not None:
        text = content
    return unwrapped(text)


def spelled_latex(text: str) -> str:
    """`text` in the package's one spelling of LaTeX; applying it again changes nothing that matters to a comparison."""
    text = unwrapped(_symbols(text))
    text = _ASIDE.sub("", text) if text[:1].isdigit() else text
    text = spelled_plainly(text)
    text = _LAYOUT.sub(" ", text).replace("$", "")
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = _fractions(text)
    text = _SCALE.sub(lambda match: f"{match[1]} \\cdot {SCALES[match[2].lower()]}", _without_unit(text))
    text = _TEXT.sub(_text_content, text)
    text = _CALLED_ROOT.sub(r"\\sqrt{\1}", _SHORT_ROOT.sub(r"\\sqrt{\1}", text))
    text = _degrees(text)
    text = text.replace("**", "^").replace("\\leq", "\\le").replace("\\geq", "\\ge").replace("\\neq", "\\ne")
    text = text.replace("\\varnothing", "\\emptyset").replace("\\langle", "(").replace("\\rangle", ")")
    text = re.sub(r"\\(le|ge|ne)(?=[^a-z]|$)", r"\\\1 ", text)
    text = _NAMES.sub(r"\\\1 ", text)
    text = _IMAGINARY.sub(" i ", text)
    text = re.sub(r"(?<![A-Za-z\\])([A-Za-z])\s*\\in\s*(?=[\[\(\\{])", "", text)
    return unwrapped(_SPACES.sub(" ", text).strip())


def compact(text: str) -> str:
    """`text`, in this spelling, without spaces and needless braces: for comparing as text."""
    text = re.sub(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])", "\\1\u2009", text)
    return _SINGLE.sub(r"\1", text.replace(" ", "").replace("\u2009", " "))


def plain_words(text: str) -> str | None:
    """The words that `text` consists of, in lower case; None when it is no text.

    Text is what stands in `\\text{}` and its kind, a single letter with or without brackets, and two or more words or
    one of three letters and more that stand without a backslash.
    """
    bare = plain_characters(text).strip()
    inner, wrappers = _TEXT.subn(r"\1", bare)
    inner = unwrapped(inner.replace("*", "").strip().strip("\"'`\u201c\u201d").strip())
    if wrappers == 0 and re.fullmatch(r"[a-z]{1,2}", inner):
        return None  # x, ab: variables
    letter = re.fullmatch(r"\(\s*([A-Za-z])\s*\)|\[\s*([A-Z])\s*\]", inner)
    if letter is not None:
        return (letter[1] or letter[2]).lower()
    if WORDS.fullmatch(inner) is None:
        return None
    return _SPACES.sub(" ", inner).lower()


def _symbols(text: str) -> str:
    text = plain_characters(text)
    if text.isascii():
        return text
    text = _SYMBOL.sub(lambda match: _SYMBOLS[match[0]], text)
    text = _SUPERSCRIPTS.sub(lambda match: "^{" + match[0].translate(_RAISED) + "}", text)
    return _ROOT.sub(lambda match: "\\sqrt{" + (match[1] or match[2] or match[3] or "") + "}", text)


def _fractions(text: str) -> str:
    if "\\" not in text:
        return text
    text = _OVER.sub(r"\\frac{\1}{\2}", text)
    text = _SHORT_FRACTION.sub(
        lambda match: f"\\frac{{{match[1]}}}{{{match[2]}}}" if match[1] else f"\\frac{{{match[3]}}}", text
    )
    return _BRACED_FRACTION.sub(r"\1{\2}", text)


def _without_unit(text: str) -> str:
    match = _UNIT_TAIL.search(text)
    if match is None or unit_name(match[1], set_off=True) is None:
        return text
    return text[: match.start()].rstrip()


def _text_content(match: re.Match[str]) -> str:
    content = match[1].strip()
    return content if len(content) <= 1 else f" {content} "


def _degrees(text: str) -> str:
    if "\\circ" not in text and "\\degree" not in text:
        return text
    if _TRIGONOMETRY.search(text):
        text = _ANGLE.sub(r"(\\frac{\1 \\pi}{180})", text)
    return _DEGREES.sub("", text)
