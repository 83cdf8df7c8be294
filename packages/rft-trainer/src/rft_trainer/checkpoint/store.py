"""Checkpoints of one run on the disk: written beside the others, completed by a rename, removed when too many."""

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rft_trainer.checkpoint.files import sync_file, write_durably
from rft_trainer.checkpoint.manifest import MANIFEST, FileFacts, Manifest, TrainerState
from rft_trainer.checkpoint.random_state import restore_random_state, save_random_state
from rft_trainer.checkpoint.retention import RetentionPolicy, Stored
from rft_trainer.checkpoint.unfinished import alone_in, marked, wait_for_marks
from rft_trainer.errors import CheckpointError
from rft_trainer.strategy.protocols import DataParallel

LATEST = "latest"
BEST = "best"

Pending = Sequence[Future[Any]]
"""What is still written in the background; nothing when the shards are written."""


@dataclass(frozen=True)
class _Writing:
    state: TrainerState
    partial: Path
    pending: Pending


class CheckpointStore:
    """Checkpoints of one run under `root`: step_000010/, and files `latest` and `best` with the name of one each.

    All methods are collective over the world; `data` carries their agreement. One checkpoint is written at a time.
    """

    def __init__(self, root: Path, data: DataParallel, retention: RetentionPolicy | None = None) -> None:
        self._root = root
        self._data = data
        self._retention = retention or RetentionPolicy()
        self._writing: _Writing | None = None

    def save(self, state: TrainerState, write_shards: Callable[[Path], Pending]) -> Path:
        """Write a checkpoint of `state`; `write_shards(folder)` is called on every rank. Collective over the world.

        Raises:
            CheckpointError: on all ranks, when any rank could not write; earlier checkpoints stay as they are.
        """
        self.begin(state, write_shards)
        final = self.finish()
        assert final is not None
        return final

    @property
    def is_writing(self) -> bool:
        """A checkpoint was begun and is not completed; equal on every rank."""
        return self._writing is not None

    def begin(self, state: TrainerState, write_shards: Callable[[Path], Pending]) -> None:
        """Start a checkpoint, after the one that is still being written. Collective over the world.

        Raises:
            CheckpointError: as `save`, for this checkpoint or the one before.
        """
        self.finish()
        partial = self._root / f".{_name(state.step)}.partial"
        self._on_main(lambda: _fresh(partial))
        pending: Pending = ()
        error: BaseException | None = None
        try:
            pending = write_shards(partial / "shards")
            save_random_state(partial, self._data.rank)
        except Exception as failure:  # noqa: BLE001 - raised on all ranks below
            error = failure
        self._together(partial, error)
        if pending:
            # For a rank that must complete the checkpoint without asking the others.
            pending = [marked(pending, partial, self._data.rank)]
        # A copy: the run goes on, and the manifest is written when the shards are.
        self._writing = _Writing(deepcopy(state), partial, pending)

    def poll(self) -> Path | None:
        """Complete the checkpoint in the background if every rank has written its part. Collective over the world.

        Raises:
            CheckpointError: as `save`.
        """
        if self._writing is None:
            return None
        busy = not all(write.done() for write in self._writing.pending)
        return None if self._data.most(int(busy)) else self.finish()

    def finish(self) -> Path | None:
        """Wait for the checkpoint in the background and complete it; None when there is none. Collective.

        Raises:
            CheckpointError: as `save`.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        partial, error = writing.partial, None
        try:
            for write in writing.pending:
                write.result()
        except Exception as failure:  # noqa: BLE001 - raised on all ranks below
            error = failure
        self._together(partial, error)
        try:
            self._record_facts(partial, self._data.rank, self._data.size)
        except OSError as failure:
            error = failure
        self._together(partial, error)
        final = self._root / _name(writing.state.step)
        self._on_main(lambda: self._complete(writing.state, partial, final))
        return final

    def finish_alone(self, *, timeout_seconds: float = 120.0) -> Path | None:
        """Wait for the checkpoint in the background and complete it, when other ranks may be in another call.

        No communication: each rank's writing leaves a mark on the shared disk, and whoever comes first completes.

        Args:
            timeout_seconds: how long to wait for the other ranks once this one has written its part.

        Raises:
            CheckpointError: a rank could not write, or has not done so in time; earlier checkpoints stay.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        partial, final = writing.partial, self._root / _name(writing.state.step)
        try:
            for write in writing.pending:
                write.result()
            wait_for_marks(partial, self._data.size, timeout_seconds)
            with alone_in(self._root):
                if partial.is_dir():
                    self._record_facts(partial, 0, 1)
                    self._complete(writing.state, partial, final)
        except Exception as failure:
            raise self._failure(failure) from failure
        return final

    def load(
        self,
        folder: Path,
        read_shards: Callable[[Path], None],
        *,
        strategy: str,
        resizable: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> TrainerState:
        """Check the manifest and every hash, then read this rank's share. Collective over the world.

        Later checkpoints of the same run are of a course that is left; they stay, and `latest` names `folder`.

        Args:
            strategy: name of the backend that reads.
            resizable: shards may be read by another number of ranks.
            settings: compared with those of the checkpoint.

        Raises:
            CheckpointError: on all ranks, when the checkpoint is incomplete or damaged, or was written by another
                strategy, other settings, or another world size where that cannot be read.
        """
        error: BaseException | None = None
        state: TrainerState | None = None
        try:
            manifest = Manifest.read(folder)
            state = manifest.trainer
            self._check_fit(folder, state, strategy, resizable, settings or {})
            # The ranks share the reading, so that hashing costs each file once.
            manifest.check_hashes(folder, sorted(manifest.files)[self._data.rank :: self._data.size])
        except (CheckpointError, OSError) as failure:
            error = failure if isinstance(failure, CheckpointError) else CheckpointError(f"{folder}: {failure}")
        self._data.together(error)
        assert state is not None
        read_shards(folder / "shards")
        restore_random_state(folder, self._data.rank)
        if folder.resolve().parent == self._root.resolve():
            self._on_main(lambda: write_durably(self._root / LATEST, folder.name))
        return state

    def _check_fit(
        self, folder: Path, state: TrainerState, strategy: str, resizable: bool, settings: dict[str, Any]
    ) -> None:
        if state.strategy != strategy:
            raise CheckpointError(
                f"{folder} was written by {state.strategy} and this run trains with {strategy}: use the same flags"
            )
        if state.world_size != self._data.size and not resizable:
            raise CheckpointError(
                f"{folder} was written by {state.world_size} ranks and this run has {self._data.size}: "
                f"{strategy} reads its shards with the same number of processes only"
            )
        saved = {name: value for name, value in state.settings.items() if name in settings}
        now = json.loads(json.dumps({name: settings[name] for name in saved}))
        different = [f"{name} was {saved[name]!r} and is {now[name]!r}" for name in saved if saved[name] != now[name]]
        if different:
            raise CheckpointError(
                f"{folder} does not fit this run: {'; '.join(different)}; resume with the settings of the checkpoint, "
                "or start a new run from its exported model"
            )

    def _record_facts(self, partial: Path, share: int, shares: int) -> None:
        """Sync and hash a share of all files."""
        files = sorted(file for file in (partial / "shards").rglob("*") if file.is_file())
        files += sorted(partial.glob("random_*.pt"))
        mine = files[share::shares]
        facts = {str(file.relative_to(partial)): asdict(FileFacts.of(file)) for file in mine}
        write_durably(partial / f"facts_{share:05d}.json", json.dumps(facts))

    def _complete(self, state: TrainerState, partial: Path, final: Path) -> None:
        facts: dict[str, FileFacts] = {}
        for part in sorted(partial.glob("facts_*.json")):
            facts.update({name: FileFacts(**entry) for name, entry in json.loads(part.read_text()).items()})
            part.unlink()
        for mark in partial.glob("written_*"):
            mark.unlink()
        write_durably(partial / MANIFEST, Manifest(trainer=state, files=dict(sorted(facts.items()))).text())
        for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
            sync_file(folder)
        replaced = replaced_folder(final)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        partial.rename(final)
        write_durably(self._root / LATEST, final.name)
        shutil.rmtree(replaced, ignore_errors=True)
        self._retain(final.name)

    def _retain(self, newest: str) -> None:
        """Name the best and remove what the policy lets go, now that the newest is complete."""
        stored = sorted(self._stored(), key=lambda item: item.name == newest)
        best = self._retention.best(stored)
        if best is not None:
            write_durably(self._root / BEST, best.name)
        for item in self._retention.removed(stored):
            doomed = self._root / f".{item.name}.removed"
            shutil.rmtree(doomed, ignore_errors=True)
            # Renamed first: half a checkpoint never has the name of one.
            (self._root / item.name).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _stored(self) -> list[Stored]:
        found = []
        for folder in complete_checkpoints(self._root):
            manifest = Manifest.read(folder)
            state, metric = manifest.trainer, self._retention.metric
            score = None if metric is None else state.evaluations.get(state.step, {}).get(metric)
            found.append(Stored(name=folder.name, bytes=manifest.bytes, score=score))
        return found

    def _together(self, partial: Path, error: BaseException | None) -> None:
        """Raise one rank's failure on all of them and give the space back. Collective over the world."""
        try:
            self._data.together(None if error is None else self._failure(error))
        except CheckpointError:
            if self._data.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _failure(self, failure: BaseException) -> CheckpointError:
        free = shutil.disk_usage(next(p for p in (self._root, *self._root.resolve().parents) if p.exists())).free
        kind = "" if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: "
        return CheckpointError(
            f"a checkpoint under {self._root} could not be written: {kind}{failure} "
            f"({free / 2**30:.1f} GiB free there); earlier checkpoints are as they were: make room, lower "
            "max_checkpoints, or let the run go on without it by on_save_error continue"
        )

    def _on_main(self, action: Callable[[], None]) -> None:
        """Run on rank 0; what cannot be written is a CheckpointError on every rank. Collective over the world."""

        def guarded() -> None:
            try:
                action()
            except OSError as failure:
                raise self._failure(failure) from failure

        self._data.on_main(guarded)


def complete_checkpoints(root: Path) -> list[Path]:
    """Folders of complete checkpoints by step, oldest first; sizes are compared, hashes are not."""
    found = []
    for folder in sorted(root.glob("step_*")):
        try:
            Manifest.read(folder)
        except CheckpointError:
            continue  # damaged from outside: never counted, never removed
        found.append(folder)
    return found


def replaced_folder(final: Path) -> Path:
    """Where a checkpoint waits while another takes its name."""
    return final.with_name(f".{final.name}.replaced")


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _fresh(folder: Path) -> None:
    """An empty folder for shards; what killed saves have left goes."""
    for pattern in (".step_*.partial", ".step_*.removed"):
        for leftover in folder.parent.glob(pattern):
            shutil.rmtree(leftover)
    (folder / "shards").mkdir(parents=True)
