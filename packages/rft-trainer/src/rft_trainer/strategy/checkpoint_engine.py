"""How DeepSpeed's checkpoint files are written and read: in the background by option, and never by plain unpickling."""

import pickle
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_trainer.errors import CheckpointError


class ShardFiles:
    """What DeepSpeed calls a checkpoint engine.

    A file that cannot be written is reported by the future of `written`, not by `save`: DeepSpeed's other ranks wait
    for this one there, and would wait for ever.

    Args:
        known: classes that a file may hold besides tensors and plain values.
    """

    name = "ShardFiles"

    def __init__(self, known: Sequence[type]) -> None:
        self._known: list[Any] = list(known)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writes: list[Future[None]] = []
        self.copies = False
        """`save` copies to the host first, so that training may go on while the files are written."""

    def save(self, state_dict: Any, path: str) -> None:
        """Start writing a file."""
        content = host_copy(state_dict, {}) if self.copies else state_dict
        self._writes.append(self._writer.submit(torch.save, content, path))

    def written(self) -> Future[None]:
        """Done when every file given to `save` since the last call is written; raises the first error."""
        writes, self._writes = self._writes, []
        return self._writer.submit(_wait_for, writes)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Tensors, plain values and the known classes of a file.

        Raises:
            CheckpointError: the file asks for anything else.
        """
        try:
            with torch.serialization.safe_globals(self._known):
                return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{path} holds what no checkpoint of this package does, and is not read") from error

    # What DeepSpeed asks besides.

    def create(self, info: object) -> None:
        """A save begins."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder."""
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    def commit(self, info: object) -> bool:
        """A save ends; the store completes it."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Weights that every rank holds are written by the first."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """DeepSpeed need not wait for the files: the store does."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Views are written once."""
        return True

    def cleanup(self) -> None:
        """Nothing is held."""


def _wait_for(writes: Sequence[Future[None]]) -> None:
    for write in writes:
        write.result()


def host_copy(value: Any, made: dict[tuple[Any, ...], Tensor]) -> Any:
    """`value` with every tensor in it copied to the host, in dictionaries, lists and tuples of any depth.

    Tensors that are the same memory, such as tied weights, share their copy; `made` holds the copies so far.
    """
    if isinstance(value, Tensor):
        plain = value.detach()
        key = (plain.device, plain.data_ptr(), plain.dtype, plain.shape, plain.stride())
        if plain.numel() == 0 or key not in made:
            made[key] = plain.to("cpu", copy=True)
        return made[key]
    if isinstance(value, dict):
        copied = {key: host_copy(entry, made) for key, entry in value.items()}
        return type(value)(copied) if type(value) is not dict else copied
    if type(value) in (list, tuple):
        return type(value)(host_copy(entry, made) for entry in value)
    return value
