"""Keeping an engine's side effects out of the training process."""

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Put back the global generators of Python, NumPy and torch (CPU and the current accelerator) after the block."""
    import numpy as np

    python, numpy, torch_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_cpu)
        if device is not None:
            torch.cuda.set_rng_state(device)


@contextmanager
def environment_variables(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables (None removes one) for the block and put the old values back.

    Engines read their switches from the environment while they are built, and child processes inherit it.
    """
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


def _apply(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
