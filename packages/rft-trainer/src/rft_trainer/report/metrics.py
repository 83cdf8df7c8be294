"""Where the metrics of each step go: JSONL, TensorBoard, or several at once."""

import json
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, runtime_checkable

from rft_trainer.errors import ConfigurationError


@runtime_checkable
class MetricLogger(Protocol):
    """Takes the metrics of one step. Made and called by one rank alone; no call communicates."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` under `step`."""

    def close(self) -> None:
        """Write out what is held back; later calls of `log` are errors."""


class JsonlLogger:
    """One JSON object a step, `{"step": 3, "reward/mean": 0.25, ...}`, readable while the run goes on.

    Values that are not finite are written as the strings "NaN", "Infinity" and "-Infinity", so that each line is JSON
    for any reader and Python's `float` takes them back.

    Args:
        path: the file; it is created with its folder.
        resume_after: None refuses a file that exists; a number keeps its steps up to that one and continues, so a
            step that is run again after a resume stands there once.

    Raises:
        ConfigurationError: the file exists and `resume_after` is None, or it cannot be written.
    """

    def __init__(self, path: str | Path, *, resume_after: int | None = None) -> None:
        self._path = Path(path)
        if self._path.exists() and resume_after is None:
            raise ConfigurationError(f"{self._path} holds an earlier run; choose another output folder or resume it")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if resume_after is not None and self._path.exists():
                self._keep_until(resume_after)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"{self._path} cannot be written: {error}; choose another folder") from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, **{name: _plain(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep_until(self, last_step: int) -> None:
        kept = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the run was killed while it wrote this line
            if row["step"] <= last_step:
                kept.append(line + "\n")
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, self._path)


class TensorBoardLogger:
    """Scalars in TensorBoard's event files.

    Args:
        folder: of the event files; created when missing.
        resume_after: steps above it that an earlier run wrote are hidden by TensorBoard.

    Raises:
        ConfigurationError: the extra `tensorboard` is missing, or the folder cannot be written.
    """

    def __init__(self, folder: str | Path, *, resume_after: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigurationError(
                "logging to TensorBoard needs the extra `tensorboard`, which is not installed; run: "
                "pip install 'rft-trainer[tensorboard]'"
            ) from error
        purge_step = None if resume_after is None else resume_after + 1
        try:
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        except OSError as error:
            raise ConfigurationError(f"{folder} cannot be written: {error}; choose another folder") from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A run of wandb; without network by default, in files that `wandb sync` sends later.

    Args:
        folder: of wandb's files; created when missing. It also keeps the run's id, so that a resume continues it.
        project: of wandb.
        mode: "offline" or "online".
        settings: of the run, shown beside its curves.
        resume_after: None begins a run; a number continues the folder's run under the same id. Offline that is a second
            folder beside the first, and `wandb sync` sends both to one run, which keeps what it had of a step.

    Raises:
        ConfigurationError: the extra `wandb` is missing, or wandb cannot begin.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        project: str,
        mode: Literal["offline", "online"] = "offline",
        settings: Mapping[str, object] | None = None,
        resume_after: int | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigurationError(
                "logging to wandb needs the extra `wandb`, which is not installed; run: "
                "pip install 'rft-trainer[wandb]'"
            ) from error
        folder = Path(folder)
        name = folder / "run_id"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if resume_after is None or not name.is_file():
                name.write_text(uuid.uuid4().hex[:8])
            self._run = wandb.init(
                project=project,
                dir=str(folder),
                mode=mode,
                id=name.read_text(),
                resume="allow",
                config=dict(settings or {}),
            )
        except (OSError, wandb.errors.Error) as error:
            raise ConfigurationError(f"wandb cannot begin a run in {folder}: {error}") from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class LoggerGroup:
    """Hands each step to several loggers; with none, metrics go nowhere."""

    def __init__(self, loggers: Sequence[MetricLogger] = ()) -> None:
        self._loggers = tuple(loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for logger in self._loggers:
            logger.log(step, metrics)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()


def _plain(value: float) -> float | str:
    """A number that JSON has a form for; integers stay integers, one-element tensors become floats."""
    number = value if isinstance(value, int) else float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")
