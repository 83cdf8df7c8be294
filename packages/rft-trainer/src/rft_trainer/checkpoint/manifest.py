"""What a checkpoint says of itself: the trainer's state, and the size and hash of each of its files."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from rft_trainer.checkpoint.files import sha256, sync_file
from rft_trainer.errors import CheckpointError

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What the trainer itself must remember, beside model, optimiser and scheduler.

    Attributes:
        step: rollout and update rounds done; the step of the last metrics.
        weights_version: of the engine.
        world_size: ranks that wrote the checkpoint.
        strategy: name of the backend that wrote it.
        sampler: position in the data and settings of their order.
        update: state of the policy update.
        settings: settings of the run that a resumed run must share.
        evaluations: metrics of the evaluations so far, by step.
    """

    step: int
    weights_version: int
    world_size: int
    strategy: str
    sampler: dict[str, Any] = field(default_factory=dict)
    update: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """What `as_json` gave, after a way through JSON, whose keys are text."""
        evaluations = {int(step): metrics for step, metrics in content.get("evaluations", {}).items()}
        return cls(**{**content, "evaluations": evaluations})


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """Size and hash of one file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> Self:
        """Facts of a file whose bytes are on the disk when this returns."""
        sync_file(file)
        return cls(bytes=file.stat().st_size, sha256=sha256(file))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A complete checkpoint's content. `files` are relative to its folder."""

    trainer: TrainerState
    files: dict[str, FileFacts]

    @property
    def bytes(self) -> int:
        """Bytes of all files, the manifest's own not counted."""
        return sum(facts.bytes for facts in self.files.values())

    def text(self) -> str:
        """The manifest as JSON."""
        files = {name: asdict(facts) for name, facts in self.files.items()}
        return json.dumps({"trainer": self.trainer.as_json(), "files": files}, indent=1)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a folder whose files have the sizes that it gives; their hashes are not looked at.

        Raises:
            CheckpointError: no manifest or not a readable one, or a file is missing or has another size.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a complete checkpoint; use another one")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            files = {name: FileFacts(**facts) for name, facts in content["files"].items()}
            manifest = cls(trainer=TrainerState.from_json(content["trainer"]), files=files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}): the checkpoint is damaged; use another") from error
        for name, facts in files.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != facts.bytes:
                raise _damaged(file)
        return manifest

    def check_hashes(self, folder: Path, names: Iterable[str] | None = None) -> None:
        """Compare the bytes of `names` (all when None) with their hashes.

        Raises:
            CheckpointError: a file differs.
        """
        for name in self.files if names is None else names:
            if sha256(folder / name) != self.files[name].sha256:
                raise _damaged(folder / name)


def read_manifest(folder: Path) -> TrainerState:
    """The trainer's state in a complete checkpoint, whose every file was read and compared.

    Raises:
        CheckpointError: no manifest, or a file is missing or differs from what the manifest says.
    """
    manifest = Manifest.read(folder)
    manifest.check_hashes(folder)
    return manifest.trainer


def _damaged(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file} is missing or differs from the manifest: the checkpoint is damaged; resume from another one"
    )
