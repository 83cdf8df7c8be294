"""A recipe: which functions score the samples of one label, and with what weights."""

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rft_rewards.errors import RecipeError
from rft_rewards.protocols import RewardFunction


def load_function(path: str) -> RewardFunction:
    """The reward function at `package.module:name`; the name may be dotted.

    Raises:
        RecipeError: `path` has another form, the module or name does not exist, or the object is not callable.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise RecipeError(f"reward function {path!r} has the wrong form: write 'package.module:name'")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"reward function {path!r} cannot be loaded ({error}): check module and name") from error
    if not callable(found):
        raise RecipeError(f"reward function {path!r} is a {type(found).__name__}: name something callable")
    return found  # type: ignore[no-any-return]


def function_name(function: RewardFunction) -> str:
    """Name under which the scores of `function` are reported."""
    name = getattr(function, "name", None) or getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


@dataclass(frozen=True, kw_only=True)
class RewardRecipe:
    """Weighted reward functions for the samples of one label; the total is the weighted sum.

    Attributes:
        label: `RewardSample.label` that this recipe serves.
        functions: reward functions or models, or `package.module:name` of one.
        weights: one weight per function; None weighs each by 1.
        missing: by function name, the score to count where the function gives None. A function without an entry
            must score every sample: its None is an error.
    """

    label: str = "default"
    functions: Sequence[RewardFunction | str]
    weights: Sequence[float] | None = None
    missing: Mapping[str, float] = field(default_factory=dict)
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        loaded = tuple(load_function(item) if isinstance(item, str) else item for item in self.functions)
        if not loaded:
            raise RecipeError(f"recipe {self.label!r} has no functions: give at least one")
        for item in loaded:
            if not callable(item):
                raise RecipeError(f"recipe {self.label!r} holds {item!r}, which is not callable")
        weights = (1.0,) * len(loaded) if self.weights is None else tuple(float(weight) for weight in self.weights)
        if len(weights) != len(loaded):
            raise RecipeError(
                f"recipe {self.label!r} has {len(loaded)} functions and {len(weights)} weights: give one weight each"
            )
        if not all(map(math.isfinite, weights)):
            raise RecipeError(f"recipe {self.label!r} has the weights {weights}: each must be finite")
        names = tuple(function_name(item) for item in loaded)
        if len(set(names)) != len(names):
            raise RecipeError(f"recipe {self.label!r} has functions of equal name {names}: give each its own `name`")
        if unknown := sorted(set(self.missing) - set(names)):
            raise RecipeError(f"recipe {self.label!r}: missing names {unknown}, its functions are {sorted(names)}")
        object.__setattr__(self, "functions", loaded)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "names", names)

    def parts(self) -> list[tuple[str, RewardFunction, float]]:
        """(name, function, weight) of each part, in order."""
        return list(zip(self.names, self.functions, self.weights or (), strict=True))  # type: ignore[arg-type]
