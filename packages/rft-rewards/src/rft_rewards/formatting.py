"""The format reward: does the response have the parts that were asked for, in order, once, and not empty."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rft_rewards.extraction import count_markers, extract_boxed, extract_gsm8k
from rft_rewards.sample import RewardSample


@dataclass(frozen=True, kw_only=True)
class FormatTemplate:
    """The asked-for form of a response, as data.

    Attributes:
        think: opening and closing mark of the reasoning, which comes first; None asks for none.
        answer: opening and closing mark around the final part; None takes everything behind the reasoning.
        final: what the final part must hold exactly once: `boxed` a box that is not empty, `marked` a `####` with a
            number, None nothing in particular.
        open_in_prompt: the prompt ends with the opening think mark, so the response starts inside the reasoning.
    """

    think: tuple[str, str] | None = ("<think>", "</think>")
    answer: tuple[str, str] | None = None
    final: str | None = "boxed"
    open_in_prompt: bool = False

    def __post_init__(self) -> None:
        for name, marks in (("think", self.think), ("answer", self.answer)):
            if marks is not None and not (len(marks) == 2 and all(marks) and marks[0] != marks[1]):
                raise ValueError(f"{name} is {marks!r}: give two different non-empty marks, or None")
        if self.final not in ("boxed", "marked", None):
            raise ValueError(f"final is {self.final!r}: give 'boxed', 'marked' or None")
        if self.open_in_prompt and self.think is None:
            raise ValueError("open_in_prompt is set without think marks: give think or leave it out")

    def fits(self, response: str) -> bool:
        """Whether `response` has this form."""
        rest = self._behind_reasoning(response)
        if rest is None:
            return False
        if self.answer is not None:
            rest = _only_part(rest, self.answer, whole=True)
        return rest is not None and self._final_fits(rest)

    def _behind_reasoning(self, response: str) -> str | None:
        if self.think is None:
            return response
        opening, closing = self.think
        text = response.strip()
        if self.open_in_prompt:
            text = opening + text
        if not text.startswith(opening) or text.count(opening) != 1 or text.count(closing) != 1:
            return None
        reasoning, _, rest = text[len(opening) :].partition(closing)
        return rest if reasoning.strip() else None

    def _final_fits(self, rest: str) -> bool:
        if self.final == "boxed":
            return count_markers(rest, "boxed") == 1 and extract_boxed(rest) is not None
        if self.final == "marked":
            return count_markers(rest) == 1 and extract_gsm8k(rest) is not None
        return bool(rest.strip())


def _only_part(text: str, marks: tuple[str, str], *, whole: bool) -> str | None:
    """What stands between `marks` when both occur once and (for `whole`) nothing but spaces stands around them."""
    found = re.fullmatch(rf"(?s)\s*{re.escape(marks[0])}(.*){re.escape(marks[1])}\s*", text) if whole else None
    if found is None or text.count(marks[0]) != 1 or text.count(marks[1]) != 1 or not found[1].strip():
        return None
    return found[1]


@dataclass(frozen=True, kw_only=True)
class HasFormat:
    """Reward function made by `has_format`."""

    template: FormatTemplate
    name: str = "format"

    def __call__(self, samples: Sequence[RewardSample]) -> list[float]:
        return [float(self.template.fits(sample.response)) for sample in samples]


def has_format(template: FormatTemplate | None = None, *, name: str = "format") -> HasFormat:
    """1.0 where the response alone has the form of `template`, else 0.0; the prompt is never looked at.

    The default template asks for `<think>...</think>` that is not empty, and behind it exactly one box that is not
    empty. A box inside the reasoning is neither asked for nor counted.
    """
    return HasFormat(template=template or FormatTemplate(), name=name)
