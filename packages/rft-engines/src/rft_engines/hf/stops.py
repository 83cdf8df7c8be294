"""When a sample has ended by itself."""

from collections.abc import Iterable, Sequence
from typing import Any

from rft_engines.sampling import SamplingParams


class StopRules:
    """End-of-sequence ids, stop ids and stop strings of one generate call."""

    def __init__(self, sampling: SamplingParams, *, eos_token_ids: Iterable[int], tokenizer: Any) -> None:
        self._ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        self._strings = sampling.stop
        self._tokenizer = tokenizer
        if self._strings and tokenizer is None:
            raise ValueError(
                f"SamplingParams.stop={self._strings} needs text, and the engine has no tokenizer: "
                f"give HFEngine one, or use stop_token_ids"
            )
        # A match that the newest token completes spans at most one token a byte; a few more let a character that
        # begins before the window come out whole.
        self._window = max((len(text.encode()) for text in self._strings), default=0) + 4

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether the newest of `tokens` ends the sample."""
        if tokens[-1] in self._ids:
            return True
        if not self._strings:
            return False
        tail = self._tokenizer.decode(
            tokens[-self._window :], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(text in tail for text in self._strings)
