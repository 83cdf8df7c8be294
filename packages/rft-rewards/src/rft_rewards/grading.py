"""Grading of bare answers: numbers and text in this process, mathematics in worker processes."""

import atexit
import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rft_rewards.errors import MissingExtraError
from rft_rewards.matching import quick_verdict
from rft_rewards.workers import WorkerPool

Symbolic: TypeAlias = Literal["auto", "require", "off"]

_MEMORY_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Verdict:
    """What grading one pair gave.

    Attributes:
        equal: the answer says the same as the gold answer; False also where that could not be found out.
        symbolic: the symbolic verifier was asked.
        timed_out: it did not answer within the limit.
        failed: it could not read the pair, or its process ended.
        unavailable: it was needed but is not installed, or is switched off.
    """

    equal: bool
    symbolic: bool = False
    timed_out: bool = False
    failed: bool = False
    unavailable: bool = False


class Grader:
    """Compares bare answers with bare gold answers.

    Args:
        symbolic: `auto` asks math-verify where it is installed (extra `math`), `require` insists on it, `off` decides
            by numbers and text alone.
        workers: processes for math-verify; they start when the first pair needs them.
        timeout_seconds: limit for one pair; over it the pair counts as not equal.

    Raises:
        ValueError: an argument is out of range.
        MissingExtraError: `require` without math-verify.
    """

    def __init__(self, *, symbolic: Symbolic = "auto", workers: int = 2, timeout_seconds: float = 5.0) -> None:
        if symbolic not in get_args(Symbolic):
            raise ValueError(f"symbolic is {symbolic!r}: give one of {', '.join(get_args(Symbolic))}")
        installed = importlib.util.find_spec("math_verify") is not None
        if symbolic == "require" and not installed:
            raise MissingExtraError("symbolic grading needs math-verify, extra 'math': pip install 'rft-rewards[math]'")
        self._pool: WorkerPool | None = None
        if symbolic != "off" and installed:
            self._pool = WorkerPool(
                "rft_rewards.symbolic:grade",
                workers=workers,
                timeout_seconds=timeout_seconds,
                memory_bytes=_MEMORY_BYTES,
            )

    def grade(self, pairs: Sequence[tuple[str | None, str]]) -> list[Verdict]:
        """Verdict on each (answer, gold), in order; an answer of None is wrong. Equal pairs are graded once.

        It may be called from any thread, and by several at once.
        """
        verdicts = {pair: self._quick(pair) for pair in pairs}
        open_pairs = [pair for pair, verdict in verdicts.items() if verdict is None]
        if self._pool is None:
            verdicts.update(dict.fromkeys(open_pairs, Verdict(False, unavailable=True)))
        else:
            for pair, outcome in zip(open_pairs, self._pool.map(open_pairs), strict=True):
                verdicts[pair] = Verdict(
                    outcome.state == "value" and bool(outcome.value),
                    symbolic=True,
                    timed_out=outcome.state == "timed out",
                    failed=outcome.state == "failed",
                )
        return [verdict for pair in pairs if (verdict := verdicts[pair]) is not None]

    def close(self) -> None:
        """End the worker processes; they start again when they are needed."""
        if self._pool is not None:
            self._pool.close()

    @staticmethod
    def _quick(pair: tuple[str | None, str]) -> Verdict | None:
        answer, gold = pair
        if answer is None:
            return Verdict(False)
        equal = quick_verdict(answer, gold)
        return None if equal is None else Verdict(equal)


@functools.cache
def shared_grader() -> Grader:
    """The grader of `answers_match` and of `exact_answer` where none is given: two workers, five seconds a pair."""
    grader = Grader()
    atexit.register(grader.close)
    return grader


def answers_match(answer: str | None, gold: str) -> bool:
    """Whether the bare answer says the same as the bare gold answer.

    Both are answers, not responses: use `extract_gsm8k` or `extract_boxed` first. Numbers are compared exactly,
    words as whole words, everything else by math-verify where it is installed (extra `math`), in a process of its
    own under a limit of five seconds. None, an empty answer, prose, alternatives ("A or B") and whatever cannot be
    read match nothing. For many pairs use `Grader.grade`, which works in parallel.
    """
    return shared_grader().grade([(answer, gold)])[0].equal
