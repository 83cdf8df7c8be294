"""The samples of a generate call while they are decoded."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rft_engines.generation import FinishReason, Generation
from rft_engines.hf.stops import StopRules
from rft_engines.hf.vision import Pictures
from rft_engines.sampling import SamplingParams
from rft_engines.seeds import UniformStream


@dataclass
class Row:
    """One sample while it is decoded.

    `position_offset` is added to the count of tokens to get the next position: a picture has more tokens than
    positions.
    """

    place: int
    sample_index: int
    prompt: tuple[int, ...]
    budget: int
    stream: UniformStream
    pictures: Pictures | None = None
    position_offset: int = 0
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, token: int, log_prob: float, stops: StopRules) -> None:
        """Append one sampled token and see whether it ends the sample."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if stops.ended(self.tokens):
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) >= self.budget:
            self.finish_reason = FinishReason.LENGTH

    def generation(self, request_id: str, sampling: SamplingParams, weights_version: int) -> Generation:
        """The sample as it stands; one that has not ended was aborted."""
        return Generation(
            request_id=request_id,
            sample_index=self.sample_index,
            prompt_token_ids=self.prompt,
            token_ids=tuple(self.tokens),
            log_probs=tuple(self.log_probs),
            finish_reason=self.finish_reason or FinishReason.ABORT,
            weights_version=weights_version,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )


class StepBudget:
    """Decoding steps left to a generate call, and whether somebody asked it to stop."""

    def __init__(self, max_steps: int | None, aborted: Callable[[], bool]) -> None:
        self._left = max_steps
        self._aborted = aborted

    def spent(self) -> bool:
        """Take one step; True when there was none left to take."""
        if self._aborted():
            return True
        if self._left is None:
            return False
        self._left -= 1
        return self._left < 0
