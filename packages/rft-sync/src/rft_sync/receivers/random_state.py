"""The trainer's random state, kept over calls into an engine that lives in the same process."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the generators of Python, torch (CPU and current device) and NumPy, where it is loaded."""
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    python_state = random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
