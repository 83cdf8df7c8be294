"""Where metrics go."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rft_trainer.errors import ConfigurationError


class MetricLogger(Protocol):
    """Takes the metrics of one step; a logger of your own needs only these two methods."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record plain numbers under their names."""

    def close(self) -> None:
        """Write out what is pending."""


class JsonlLogger:
    """One JSON object per call, appended and flushed, so that a killed run keeps its lines."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._stream = file.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append `step`, wall-clock `time` and the metrics; numbers that are not finite become null."""
        numbers = {name: value if _finite(value) else None for name, value in metrics.items()}
        self._stream.write(json.dumps({"step": step, "time": time.time(), **numbers}) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class TensorBoardLogger:
    """TensorBoard event files.

    Raises:
        ConfigurationError: tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigurationError(
                "TensorBoard logging needs the extra 'tensorboard': `pip install 'rft-trainer[tensorboard]'`"
            ) from error
        self._writer: Any = SummaryWriter(log_dir=str(folder))  # type: ignore[no-untyped-call]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _finite(value: float) -> bool:
    return value == value and value not in (float("inf"), float("-inf"))
