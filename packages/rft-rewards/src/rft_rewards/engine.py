"""The engine: runs what a batch needs and lays the scores together, sample by sample."""

import inspect
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import cast

from rft_rewards.background import BackgroundTasks
from rft_rewards.errors import RecipeError, RewardError, RewardFunctionError, UnknownLabelError
from rft_rewards.protocols import RawScore, RewardFunction, RewardModel
from rft_rewards.recipe import RewardRecipe
from rft_rewards.result import result_of_parts
from rft_rewards.sample import RewardSample
from rft_rewards.score import RewardResult, Score
from rft_rewards.scoring import checked_scores


@dataclass(slots=True)
class _Call:
    """One function with the samples of the batch that need it."""

    name: str
    function: RewardFunction
    positions: list[int]
    samples: list[RewardSample]
    scores: list[Score]

    def settle(self, raw: Sequence[RawScore]) -> None:
        self.scores = checked_scores(self.name, raw, self.positions)


class RewardComputationEngine:
    """Scores batches by recipe.

    Per batch every function is called at most once, with exactly the samples whose label names it, in batch order.
    Coroutine functions run together on a background event loop while the plain functions run one after the other on
    the calling thread; a `RewardModel` is loaded before its turn and released after it. A function that only other
    labels name is not called, and its model is not loaded.

    Args:
        recipes: one recipe, or several with different labels.

    Raises:
        RecipeError: no recipe, or two for one label.
    """

    def __init__(self, recipes: RewardRecipe | Sequence[RewardRecipe]) -> None:
        listed = [recipes] if isinstance(recipes, RewardRecipe) else list(recipes)
        if not listed:
            raise RecipeError("no recipes: give at least one RewardRecipe")
        self._recipes: dict[str, RewardRecipe] = {}
        for recipe in listed:
            if recipe.label in self._recipes:
                raise RecipeError(f"two recipes for label {recipe.label!r}: give each label one recipe")
            self._recipes[recipe.label] = recipe
        self._counters: Counter[str] = Counter()

    @property
    def labels(self) -> tuple[str, ...]:
        """Known labels, sorted."""
        return tuple(sorted(self._recipes))

    def take_counters(self) -> dict[str, int]:
        """Events since the last call by `function/event`, for metrics; sets them to zero, keeping the keys.

        `samples` counts the scored samples, `function/missing` the scores that were missing by rule; everything else
        comes from `Score.counts`.
        """
        counters = dict(self._counters)
        self._counters = Counter(dict.fromkeys(counters, 0))
        return counters

    def compute(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score `samples`; the results have the same length and order.

        Raises:
            UnknownLabelError: a label has no recipe; raised before anything runs.
            RewardFunctionError: a function raised; the message names the function and the sample.
            InvalidScoreError: a wrong number of scores, NaN or infinity, None without a rule for it, or no number.
            RewardError: what a function of this package raises itself, for example `MissingReferenceError`.
        """
        calls = self._plan(samples)
        with BackgroundTasks() as background:
            for call in (call for call in calls if _is_coroutine_function(call.function)):
                background.add(_settle_later(call, cast("Awaitable[Sequence[RawScore]]", call.function(call.samples))))
            for call in (call for call in calls if not _is_coroutine_function(call.function)):
                raw = _run(call)
                if inspect.isawaitable(raw):
                    background.add(_settle_later(call, raw))
                else:
                    call.settle(raw)
        return self._assemble(samples, calls)

    def _plan(self, samples: Sequence[RewardSample]) -> list[_Call]:
        calls: dict[int, _Call] = {}
        for position, sample in enumerate(samples):
            recipe = self._recipes.get(sample.label)
            if recipe is None:
                known = ", ".join(map(repr, self.labels))
                raise UnknownLabelError(
                    f"sample {position} has label {sample.label!r}: no recipe; known labels: {known}"
                )
            for name, function, _ in recipe.parts():
                call = calls.setdefault(id(function), _Call(name, function, [], [], []))
                call.positions.append(position)
                call.samples.append(sample)
        return list(calls.values())

    def _assemble(self, samples: Sequence[RewardSample], calls: Sequence[_Call]) -> list[RewardResult]:
        by_place = {
            (id(call.function), position): score
            for call in calls
            for position, score in zip(call.positions, call.scores, strict=True)
        }
        results = []
        for position, sample in enumerate(samples):
            recipe = self._recipes[sample.label]
            parts = [
                (name, weight, by_place[id(function), position], recipe.missing.get(name))
                for name, function, weight in recipe.parts()
            ]
            results.append(result_of_parts(position, parts))
        self._count(calls, results)
        return results

    def _count(self, calls: Sequence[_Call], results: Sequence[RewardResult]) -> None:
        self._counters["samples"] += len(results)
        for call in calls:
            for score in call.scores:
                for event, number in score.counts.items():
                    self._counters[f"{call.name}/{event}"] += number
        for recipe in self._recipes.values():
            for name in recipe.missing:
                self._counters[f"{name}/missing"] += 0  # the key is there before the first event
        for result in results:
            for name in result.missing:
                self._counters[f"{name}/missing"] += 1


def _is_coroutine_function(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _run(call: _Call) -> Sequence[RawScore] | Awaitable[Sequence[RawScore]]:
    try:
        if isinstance(call.function, RewardModel):
            call.function.load()
            try:
                return call.function(call.samples)
            finally:
                call.function.release()
        return call.function(call.samples)
    except RewardError:
        raise
    except Exception as error:
        raise _failure(call, error, _first_failing(call)) from error


async def _settle_later(call: _Call, awaitable: Awaitable[Sequence[RawScore]]) -> None:
    try:
        raw = await awaitable
    except RewardError:
        raise
    except Exception as error:
        raise _failure(call, error, None) from error
    call.settle(raw)


def _failure(call: _Call, error: Exception, position: int | None) -> RewardFunctionError:
    shown = ", ".join(map(str, call.positions[:8])) + (", ..." if len(call.positions) > 8 else "")
    place = f"samples {shown}" if position is None else f"sample {position}"
    return RewardFunctionError(f"reward function {call.name!r} raised {type(error).__name__} on {place}: {error}")


def _first_failing(call: _Call) -> int | None:
    """Batch position of the first sample on which the function also raises when it is alone; None if there is none.

    A model is not asked again: its failures (memory, weights) seldom come from one sample.
    """
    if isinstance(call.function, RewardModel):
        return None
    for position, sample in zip(call.positions, call.samples, strict=True):
        try:
            call.function([sample])
        except Exception:  # noqa: BLE001 - only asked whether it raises
            return position
    return None
