"""What to sample from and when to stop, as one checked value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real

from rft_engines.counts import is_count, whole_numbers
from rft_engines.errors import UnsupportedCombinationError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one generate call. Every value is ours: nothing is filled in from a checkpoint's defaults.

    The order is temperature, then `top_k`, then `top_p`. `temperature=0` is greedy; the log-probabilities it reports
    are those of the untempered full distribution, and `top_k` and `top_p` do not apply.

    Attributes:
        n: samples per prompt.
        temperature: divisor of the logits, 0 for greedy.
        top_p: keep the smallest set of most likely tokens whose mass reaches `top_p`; 1 keeps all.
        top_k: keep the `top_k` most likely tokens; 0 keeps all.
        max_new_tokens: most tokens per sample; a request may ask for fewer.
        stop: strings; a sample ends with the token that completes one of them (that token is kept).
        stop_token_ids: ids that end a sample (kept), beside the engine's end-of-sequence ids.
        first_token_temperature: temperature of a response's first token alone (FIRE, arXiv 2410.21236); None: as the
            rest. Only the embedded engine has it.
        ignore_eos: go on past the engine's end-of-sequence ids; `stop` and `stop_token_ids` still hold.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    first_token_temperature: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise ValueError(f"SamplingParams.stop={self.stop!r} is one string: give a tuple of strings")  # noqa: TRY004
        object.__setattr__(self, "stop", tuple(self.stop))
        try:
            object.__setattr__(self, "stop_token_ids", whole_numbers(self.stop_token_ids))
        except TypeError:
            raise ValueError(f"SamplingParams.stop_token_ids={self.stop_token_ids!r}: give whole numbers") from None
        if not all(isinstance(text, str) for text in self.stop):
            raise ValueError(f"SamplingParams.stop={self.stop!r}: give strings; ids go into stop_token_ids")
        for name in ("temperature", "top_p", "first_token_temperature"):
            value = getattr(self, name)
            optional = value is None and name == "first_token_temperature"
            if not optional and (isinstance(value, bool) or not isinstance(value, Real)):
                raise ValueError(f"SamplingParams.{name}={value!r}: give a number")
        for name, lowest in (("n", 1), ("max_new_tokens", 1), ("top_k", 0)):
            value = getattr(self, name)
            if not is_count(value, lowest):
                raise ValueError(f"SamplingParams.{name}={value!r}: give an integer of at least {lowest}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"SamplingParams.temperature={self.temperature!r}: give 0 (greedy) or a finite number above"
            )
        first = self.first_token_temperature
        if first is not None and not (math.isfinite(first) and first > 0 and self.temperature > 0):
            raise ValueError(
                f"SamplingParams.first_token_temperature={first!r} with temperature={self.temperature!r}: "
                "give finite numbers above 0"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams.top_p={self.top_p!r}: give a number above 0 and at most 1 (1 keeps all)")
        if "" in self.stop:
            raise ValueError("SamplingParams.stop holds an empty string: leave it out, every text contains it")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"SamplingParams.stop_token_ids={self.stop_token_ids}: token ids are 0 or above")

    def at(self, position: int) -> "SamplingParams":
        """What the token at `position` of a response is sampled with."""
        if position or self.first_token_temperature is None:
            return self
        return replace(self, temperature=self.first_token_temperature, first_token_temperature=None)

    def refuse_first_token_temperature(self, engine: str) -> None:
        """Raise UnsupportedCombinationError for an engine that samples all tokens of a response alike."""
        if self.first_token_temperature is not None:
            raise UnsupportedCombinationError(
                f"engine {engine!r} and first_token_temperature={self.first_token_temperature}: it has one temperature "
                "for all tokens of a response; use the embedded engine 'hf'"
            )

    def refuse_temperature_below(self, lowest: float, engine: str) -> None:
        """Raise UnsupportedCombinationError for an engine that silently samples with another temperature there."""
        if 0 < self.temperature < lowest:
            raise UnsupportedCombinationError(
                f"engine {engine!r} and temperature={self.temperature}: below {lowest} it samples with another "
                f"temperature than it is given; use 0 (greedy) or {lowest} and above"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken at each step."""
        return self.temperature == 0
