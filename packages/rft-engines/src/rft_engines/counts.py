"""Whole numbers that callers give: True, 1.5 and "3" are none."""

from collections.abc import Iterable
from operator import index
from typing import Any


def is_count(value: Any, least: int = 1) -> bool:
    """Whether `value` is an int of at least `least`; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def whole_numbers(values: Iterable[Any]) -> tuple[int, ...]:
    """`values` as plain ints: ints of NumPy and torch are taken, nothing is rounded or parsed.

    Raises:
        TypeError: one of them is no whole number, or `values` is no iterable.
    """
    return tuple(map(index, values))
