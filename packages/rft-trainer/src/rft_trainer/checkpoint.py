"""Checkpoints that are complete or absent: temporary folder, manifest with sizes and hashes, one rename."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rft_trainer.errors import CheckpointError
from rft_trainer.strategy.protocols import DataParallel

MANIFEST = "manifest.json"
LATEST = "latest"


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What the trainer itself must remember, beside model, optimiser and scheduler."""

    step: int
    weights_version: int
    world_size: int
    strategy: str
    sampler: dict[str, Any] = field(default_factory=dict)
    update: dict[str, Any] = field(default_factory=dict)


class CheckpointStore:
    """Checkpoints of one run under `root`: step_000010/, and a file `latest` with the name of the newest.

    All methods that write or restore are collective over the world; `data` carries their agreement.
    """

    def __init__(self, root: Path, data: DataParallel) -> None:
        self._root = root
        self._data = data

    def save(self, state: TrainerState, write_shards: Callable[[Path], None]) -> Path:
        """Write a checkpoint of `state`; `write_shards(folder)` is called on every rank. Collective over the world.

        Raises:
            CheckpointError: on all ranks, when any rank could not write; earlier checkpoints stay as they are.
        """
        final = self._root / f"step_{state.step:06d}"
        partial = self._root / f".step_{state.step:06d}.partial"
        self._on_main(lambda: _fresh(partial))
        try:
            write_shards(partial / "shards")
            torch.save(_random_state(), partial / f"random_{self._data.rank:05d}.pt")
            error: BaseException | None = None
        except Exception as failure:  # noqa: BLE001 - raised on all ranks below
            error = CheckpointError(f"checkpoint {final} could not be written: {type(failure).__name__}: {failure}")
        self._data.together(error)
        self._on_main(lambda: self._complete(state, partial, final))
        return final

    def _complete(self, state: TrainerState, partial: Path, final: Path) -> None:
        files = {
            str(file.relative_to(partial)): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
            for file in sorted(partial.rglob("*"))
            if file.is_file()
        }
        _write_durably(partial / MANIFEST, json.dumps({"trainer": asdict(state), "files": files}, indent=1))
        replaced = final.with_name(f".{final.name}.replaced")
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        _write_durably(self._root / LATEST, final.name)
        shutil.rmtree(replaced, ignore_errors=True)

    def load(self, folder: Path, read_shards: Callable[[Path], None], *, strategy: str) -> TrainerState:
        """Check the manifest, then read this rank's share. Collective over the world.

        Raises:
            CheckpointError: on all ranks, when the checkpoint is incomplete, or was written by another world size or
                another strategy than `strategy`.
        """
        error: BaseException | None = None
        state: TrainerState | None = None
        try:
            state = read_manifest(folder)
            if state.world_size != self._data.size:
                raise CheckpointError(
                    f"{folder} was written by {state.world_size} ranks and this run has {self._data.size}: "
                    "start with the same number of processes"
                )
            if state.strategy != strategy:
                raise CheckpointError(
                    f"{folder} was written by {state.strategy} and this run trains with {strategy}: use the same flags"
                )
        except CheckpointError as failure:
            error = failure
        self._data.together(error)
        assert state is not None
        read_shards(folder / "shards")
        _restore_random_state(torch.load(folder / f"random_{self._data.rank:05d}.pt", weights_only=True))
        return state

    def _on_main(self, action: Callable[[], None]) -> None:
        """Run on rank 0; what cannot be written is a CheckpointError on every rank. Collective over the world."""

        def guarded() -> None:
            try:
                action()
            except OSError as failure:
                raise CheckpointError(f"checkpoint under {self._root} could not be written: {failure}") from failure

        self._data.on_main(guarded)


def read_manifest(folder: Path) -> TrainerState:
    """The trainer's state in a complete checkpoint.

    Raises:
        CheckpointError: no manifest, or a file is missing or differs from what the manifest says.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a complete checkpoint; use another one")
    content = json.loads(manifest.read_text())
    for name, facts in content["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != facts["bytes"] or _sha256(file) != facts["sha256"]:
            raise CheckpointError(f"{file} is missing or differs from the manifest: the checkpoint is damaged")
    return TrainerState(**content["trainer"])


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "shards").mkdir(parents=True)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_durably(file: Path, text: str) -> None:
    """Replace a file so that a reader sees the old or the new content, also after a power cut."""
    temporary = file.with_name(f".{file.name}.new")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


def _random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
