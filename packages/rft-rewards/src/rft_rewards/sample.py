"""What is scored: one response with everything a reward function may look at."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One response to be scored.

    The prompt is kept apart from the response so that a function can never pay for text that the model was given.

    Attributes:
        response: what the model wrote, without prompt, system text or special tokens.
        response_ids: token ids of the response as sampled, `[T]`; lengths in tokens are taken from here.
        prompt: what the model was given, for reward models that judge a response in its context.
        reference: the gold answer, or the gold text that holds it behind `####`; None where there is none.
        label: selects the recipe.
        metadata: anything else a custom function needs.
        images: pictures of the prompt in order: bytes of an encoded picture, or a `data:` or `https:` address.
        truncated: the response ended at the length limit instead of an end token.
    """

    response: str
    response_ids: tuple[int, ...] = ()
    prompt: str = ""
    reference: str | None = None
    label: str = "default"
    metadata: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    images: tuple[Any, ...] = ()
    truncated: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by value: a read-only mapping view cannot be pickled itself."""
        arguments = (self.response, self.response_ids, self.prompt, self.reference, self.label)
        return (RewardSample, (*arguments, dict(self.metadata), self.images, self.truncated))
