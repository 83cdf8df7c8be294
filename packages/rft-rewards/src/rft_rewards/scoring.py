"""Checks on what reward functions return: the one place where raw scores become numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rft_rewards.errors import InvalidScoreError
from rft_rewards.protocols import RawScore
from rft_rewards.score import Score


def checked_scores(name: str, raw: Sequence[RawScore], positions: Sequence[int]) -> list[Score]:
    """`raw` as scores with finite numbers, one per position.

    Accepted: `Score`; Python and numpy numbers and tensors of one element; a mapping with the key `score` (its other
    keys become diagnostics; a 0.0 is a score); None for a missing score. NaN and infinity are errors.

    Args:
        name: the function's name, for messages.
        raw: what the function returned.
        positions: batch position of each sample that the function was given.

    Raises:
        InvalidScoreError: the lengths differ, or a score is no finite number.
    """
    try:
        given = list(raw)
    except TypeError as error:
        raise InvalidScoreError(f"reward function {name!r} returned {type(raw).__name__}: return a sequence") from error
    if len(given) != len(positions):
        raise InvalidScoreError(
            f"reward function {name!r} returned {len(given)} scores for {len(positions)} samples "
            f"(batch positions {_shown(positions)}): return one per sample, None where there is no score"
        )
    return [_checked(name, item, position) for item, position in zip(given, positions, strict=True)]


def _shown(positions: Sequence[int]) -> str:
    return ", ".join(map(str, positions[:8])) + (", ..." if len(positions) > 8 else "")


def _checked(name: str, item: RawScore, position: int) -> Score:
    if item is None:
        return Score(None)
    if isinstance(item, Score):
        return _checked_steps(name, item, position)
    if isinstance(item, Mapping):
        if "score" not in item:
            raise InvalidScoreError(
                f"reward function {name!r} returned a mapping for sample {position} "
                f"without the key 'score': its keys are {sorted(item)}"
            )
        rest: dict[str, Any] = {key: value for key, value in item.items() if key != "score"}
        value = None if item["score"] is None else _number(name, item["score"], position)
        return Score(value, diagnostics=rest)
    return Score(_number(name, item, position))


def _checked_steps(name: str, score: Score, position: int) -> Score:
    steps = tuple((int(index), _number(name, reward, position)) for index, reward in score.steps)
    if any(index < 0 for index, _ in steps):
        raise InvalidScoreError(f"reward function {name!r} gave sample {position} a step at a negative token: {steps}")
    value = math.fsum(reward for _, reward in steps) if steps and score.value is None else score.value
    checked = None if value is None else _number(name, value, position)
    return Score(checked, steps, score.diagnostics, score.counts)


def _number(name: str, item: Any, position: int) -> float:
    try:
        if isinstance(item, str | bytes):
            raise TypeError("text is no number")
        number = float(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidScoreError(
            f"reward function {name!r} returned {item!r} for sample {position}: return a number or None ({error})"
        ) from error
    if not math.isfinite(number):
        raise InvalidScoreError(
            f"reward function {name!r} returned {number} for sample {position}: scores must be finite"
        )
    return number
