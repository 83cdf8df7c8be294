"""Unicode and LaTeX spelling variants brought to one plain form."""

import re
import unicodedata

_MINUS = dict.fromkeys(map(ord, "\u2212\u2012\u2013\u2014\u2010\u2011\ufe63\uff0d"), "-")
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2007\u2008\u2009\u200a\u202f\u205f\u3000"), "\u2009")
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u200e\u200f\u061c\x00"), None)
_SIGNS = {
    ord("\uff0c"): ",",
    ord("\uff0e"): ".",
    ord("\u066b"): ".",
    ord("\u066c"): ",",
    ord("\uff05"): "%",
    ord("\u066a"): "%",
    ord("\uff0b"): "+",
    ord("\uff0f"): "/",
    ord("\u2044"): "/",
    ord("\u2215"): "/",
    ord("\u00d7"): "\\times ",
    ord("\uff04"): "$",
    ord("\u00b0"): "^\\circ ",
    ord("\u2032"): "'",
}
_VULGAR = re.compile("(\\d?)([\u00bc-\u00be\u2150-\u215e\u2189])")
_TABLE = _MINUS | _SPACES | _INVISIBLE | _SIGNS

MINUS_SIGNS = "-" + "".join(map(chr, _MINUS))


def plain_characters(text: str) -> str:
    """Digits of any script, minus signs, spaces and punctuation as ASCII; superscripts stay what they are.

    Spaces other than the ASCII one become a thin space (U+2009), which groups digits; zero-width marks and null bytes
    go away. The result does not change when the function is applied to it again.
    """
    if text.isascii():
        return text.replace("\x00", "") if "\x00" in text else text
    text = _VULGAR.sub(_spelled_fraction, text.translate(_TABLE))
    if text.isascii():
        return text
    return "".join(_ascii_digit(character) for character in text)


def _spelled_fraction(match: re.Match[str]) -> str:
    fraction = unicodedata.normalize("NFKC", match[2]).replace("\u2044", "/")
    return f"{match[1]} {fraction}" if match[1] else fraction


def _ascii_digit(character: str) -> str:
    if character.isascii():
        return character
    digit = unicodedata.decimal(character, None)
    return character if digit is None else str(digit)
