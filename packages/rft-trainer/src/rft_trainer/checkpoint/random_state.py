"""The state of every global random generator of this rank, as values that load without unpickling objects."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch


def random_file(folder: Path, rank: int) -> Path:
    """Where a rank's generators are kept in a checkpoint."""
    return folder / f"random_{rank:05d}.pt"


def random_state() -> dict[str, Any]:
    """Torch's, Python's and numpy's generators and that of this rank's CUDA device."""
    import numpy as np

    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [str(kind), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Take back what `random_state` gave."""
    import numpy as np

    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Whatever is drawn inside, the generators are as before afterwards."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def save_random_state(folder: Path, rank: int) -> None:
    """Write this rank's generators."""
    torch.save(random_state(), random_file(folder, rank))


def restore_random_state(folder: Path, rank: int) -> None:
    """Take back what `save_random_state` wrote; a rank that did not exist then keeps its generators."""
    file = random_file(folder, rank)
    if file.is_file():
        set_random_state(torch.load(file, weights_only=True))
