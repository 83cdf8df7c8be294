"""Accuracy by math-verify's own reading of a whole response, as evaluation harnesses report it."""

import atexit
import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from rft_rewards.errors import MissingExtraError, MissingReferenceError
from rft_rewards.extraction import gsm8k_reference
from rft_rewards.sample import RewardSample
from rft_rewards.score import Score
from rft_rewards.workers import Outcome, WorkerPool

_MEMORY_BYTES = 2 << 30
_WORKERS = 2
_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class SymbolicAnswer:
    """Reward function made by `symbolic_answer`."""

    name: str = "accuracy_symbolic"

    def __call__(self, samples: Sequence[RewardSample]) -> list[Score]:
        pairs = [(sample.response, self._gold(sample)) for sample in samples]
        # Equal pairs are read once.
        asked = list(dict.fromkeys(pairs))
        outcomes = dict(zip(asked, _readers().map(asked), strict=True))
        return [_score(outcomes[pair]) for pair in pairs]

    def _gold(self, sample: RewardSample) -> str:
        reference = sample.reference
        if reference is None or not reference.strip():
            raise MissingReferenceError(
                f"{self.name} needs RewardSample.reference, which is {reference!r}: give every sample's gold answer"
            )
        return reference if "####" not in reference else gsm8k_reference(reference)


def symbolic_answer(*, name: str = "accuracy_symbolic") -> SymbolicAnswer:
    """Accuracy: 1.0 where math-verify finds the gold answer in the response, else 0.0.

    Unlike `exact_answer`, the place is math-verify's own choice: LaTeX or a plain number or expression, later ones and
    announced ones first. The gold answer is read as mathematics by itself. Each score carries what was found as the
    diagnostic `answer`. A response that takes longer than five seconds scores 0 and is counted.

    Raises:
        MissingExtraError: math-verify is not installed (extra `math`).
        MissingReferenceError: when called with a sample that has no reference.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise MissingExtraError("symbolic answers need math-verify, extra 'math': pip install 'rft-rewards[math]'")
    return SymbolicAnswer(name=name)


@functools.cache
def _readers() -> WorkerPool:
    """The processes that all such functions share."""
    pool = WorkerPool(
        "rft_rewards.symbolic:read", workers=_WORKERS, timeout_seconds=_TIMEOUT_SECONDS, memory_bytes=_MEMORY_BYTES
    )
    atexit.register(pool.close)
    return pool


def _score(outcome: Outcome) -> Score:
    answer, equal = outcome.value if outcome.state == "value" else (None, False)
    counts = {
        "missing_answer": answer is None,
        "timeouts": outcome.state == "timed out",
        "grader_failures": outcome.state == "failed",
    }
    diagnostics = {"answer": answer, **{event: True for event, happened in counts.items() if happened}}
    return Score(
        float(equal),
        diagnostics=diagnostics,
        counts={event: int(happened) for event, happened in counts.items()},
    )
