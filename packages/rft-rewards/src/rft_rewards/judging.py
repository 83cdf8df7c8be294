"""The question put to a judge model, and how its verdict becomes a score. The same for local and remote judges."""

import math
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rft_rewards.sample import RewardSample

_FIELDS = frozenset({"prompt", "response", "reference"})
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class JudgePrompt:
    """A question about one response whose answer is one token: yes or no, or a whole number.

    Attributes:
        template: the user message, with the fields `{prompt}`, `{response}` and `{reference}`.
        kind: `yes_no` scores the probability of yes against no; `score` the mean of the numbers from `lowest` to
            `highest` under their probabilities, mapped to 0..1.
        system: a system message, or "".
        yes, no: the words of the two verdicts; upper and lower case and a leading space are tried as well.
        lowest, highest: range of `score`, whole numbers of one token each.
    """

    template: str
    kind: Literal["yes_no", "score"] = "yes_no"
    system: str = ""
    yes: str = "Yes"
    no: str = "No"
    lowest: int = 1
    highest: int = 5

    def __post_init__(self) -> None:
        fields = {name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None}
        if "response" not in fields or fields - _FIELDS:
            raise ValueError(
                f"template has the fields {sorted(fields)}: it needs {{response}} and knows {sorted(_FIELDS)}; "
                "write braces that are meant as text twice"
            )
        if self.kind not in ("yes_no", "score"):
            raise ValueError(f"kind is {self.kind!r}: give 'yes_no' or 'score'")
        if self.lowest >= self.highest:
            raise ValueError(f"lowest is {self.lowest} and highest {self.highest}: give lowest < highest")
        if self.yes.strip().lower() == self.no.strip().lower():
            raise ValueError(f"yes and no are both {self.yes!r}: give two different words")

    def messages(self, sample: RewardSample) -> list[dict[str, str]]:
        """Chat messages that put the question about `sample`; text that is filled in is never expanded itself."""
        question = self.template.format(
            prompt=sample.prompt, response=sample.response, reference=sample.reference or ""
        )
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": question}]

    def verdicts(self) -> dict[str, float]:
        """The words that may stand for a verdict, with the score of each."""
        if self.kind == "score":
            span = self.highest - self.lowest
            return {str(value): (value - self.lowest) / span for value in range(self.lowest, self.highest + 1)}
        spellings = {}
        for word, value in ((self.yes, 1.0), (self.no, 0.0)):
            for form in (word, word.lower(), word.upper(), word.capitalize()):
                spellings[form] = value
        return spellings

    def score_of_log_probs(self, log_probs: Mapping[str, float]) -> float | None:
        """Score from the log-probabilities of the first token's candidates; None where no candidate is a verdict."""
        verdicts = self.verdicts()
        weights = [
            (verdicts[token.strip()], math.exp(log_prob))
            for token, log_prob in log_probs.items()
            if token.strip() in verdicts
        ]
        total = math.fsum(weight for _, weight in weights)
        return math.fsum(value * weight for value, weight in weights) / total if total > 0 else None

    def score_of_text(self, text: str) -> float | None:
        """Score from the written verdict; None where the text does not open with one."""
        if self.kind == "score":
            number = _NUMBER.search(text)
            if number is None or not self.lowest <= float(number[0]) <= self.highest:
                return None
            return (float(number[0]) - self.lowest) / (self.highest - self.lowest)
        word = re.match(r"[\W_]*(\w+)", text)
        return None if word is None else self.verdicts().get(word[1])
