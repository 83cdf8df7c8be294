"""The responses of each step as files: what was asked, what was said, how it was scored, with a limit on size."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft_trainer.errors import ConfigurationError

LOG_PROB_DIGITS = 5


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One response with all that decided its part in the update.

    Attributes:
        prompt_id: id of the prompt's record; the samples of one group share it.
        prompt: text that the model was given.
        response: text that it wrote.
        reference: gold answer.
        reward: total of the scores as used for training.
        scores: each reward function's own score, unweighted.
        length: response tokens, the end token included.
        truncated: ended by the length limit.
        advantage: of the response; for token-level estimators the mean over its tokens.
        engine_log_probs: `[T]`, of the sampled tokens, from the engine.
        trainer_log_probs: `[T]`, of the same tokens, from the training model.
        weights_version: of the weights that wrote it.
    """

    prompt_id: str
    prompt: str
    response: str
    reference: str | None
    reward: float
    scores: Mapping[str, float] = field(default_factory=dict)
    length: int
    truncated: bool
    advantage: float
    engine_log_probs: tuple[float, ...] = ()
    trainer_log_probs: tuple[float, ...] = ()
    weights_version: int = 0

    def as_row(self) -> dict[str, Any]:
        """The fields as JSON values; log-probabilities rounded to five digits behind the point."""
        row = dict(vars(self))
        row["scores"] = dict(self.scores)
        for name in ("engine_log_probs", "trainer_log_probs"):
            row[name] = [round(value, LOG_PROB_DIGITS) for value in row[name]]
        return row


class RolloutWriter:
    """Writes `<name>-000012.jsonl` for step 12: one response a line, in the order given.

    A step's file holds whole responses up to `max_step_bytes`; when some do not fit, its last line is
    `{"left_out": 17}`. When all files together pass `max_total_bytes`, the oldest are removed. A file appears complete
    or not at all. For one rank alone; no call communicates.

    Args:
        folder: of the files; created when missing.
        max_step_bytes: limit of one file; 0 writes nothing.
        max_total_bytes: limit of all files with the same `name` together; the newest always stays.
        name: begins each file's name.

    Raises:
        ConfigurationError: a negative limit, or a folder that cannot be made.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_step_bytes: int = 4 * 2**20,
        max_total_bytes: int = 512 * 2**20,
        name: str = "train",
    ) -> None:
        if max_step_bytes < 0 or max_total_bytes < 0:
            raise ConfigurationError(
                f"max_step_bytes is {max_step_bytes} and max_total_bytes is {max_total_bytes}; neither may be negative"
            )
        self._folder, self._name = Path(folder), name
        self._max_step_bytes, self._max_total_bytes = max_step_bytes, max_total_bytes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"{folder} cannot be made: {error}; choose another output folder") from error

    def write(self, step: int, rollouts: Iterable[Rollout]) -> Path | None:
        """Write the file of `step`, over an earlier one of the same step; None when `max_step_bytes` is 0."""
        if self._max_step_bytes == 0:
            return None
        path = self._folder / f"{self._name}-{step:06d}.jsonl"
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(b"".join(self._lines(rollouts)))
        os.replace(partial, path)
        self._remove_oldest(path)
        return path

    def _lines(self, rollouts: Iterable[Rollout]) -> list[bytes]:
        lines: list[bytes] = []
        used = left_out = 0
        for rollout in rollouts:
            line = json.dumps(rollout.as_row(), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
            if left_out or used + len(line) > self._max_step_bytes:
                left_out += 1
                continue
            lines.append(line)
            used += len(line)
        if left_out:
            lines.append(json.dumps({"left_out": left_out}).encode() + b"\n")
        return lines

    def _remove_oldest(self, newest: Path) -> None:
        files = sorted(path for path in self._folder.glob(f"{self._name}-*.jsonl") if path != newest)
        total = newest.stat().st_size + sum(path.stat().st_size for path in files)
        for path in files:
            if total <= self._max_total_bytes:
                return
            total -= path.stat().st_size
            path.unlink()
