"""The responses of each step as files: what was asked, what was said, how it was scored, with a limit on size."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft_trainer.errors import ConfigurationError

DIGITS = 5
PER_TOKEN = ("engine_log_probs", "trainer_log_probs", "ratios", "advantages", "entropies")
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 8
"""Tokens after which a text that does not become whole is taken as it is."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One response with all that decided its part in the update.

    Attributes:
        group: number of the prompt in its data set; the samples of one group share it.
        prompt_id: id of the prompt's record.
        prompt: text that the model was given.
        response: text that it wrote.
        reference: gold answer.
        reward: total of the scores as used for training.
        scores: each reward function's own score, unweighted.
        length: response tokens, the end token included.
        truncated: ended by the length limit.
        label: of the reward recipe.
        advantage: of the response; for token-level estimators the mean over its tokens.
        token_ids, tokens: `[T]`, as sampled and as text; a token that ends within a character has no text, and the
            next one has it all.
        engine_log_probs: `[T]`, of the sampled tokens, from the engine.
        trainer_log_probs: `[T]`, of the same tokens, from the training model before the update.
        ratios: `[T]`, probability in the last pass of the update over that before it.
        advantages: `[T]`.
        entropies: `[T]`, of the distribution that each token was drawn from, in the last pass of the update.
        mask: `[T]`, 1 for tokens that are trained; nothing when all are.
        weights_version: of the weights that wrote it.
    """

    group: int = 0
    prompt_id: str
    prompt: str
    response: str
    reference: str | None
    label: str = "default"
    reward: float
    scores: Mapping[str, float] = field(default_factory=dict)
    length: int
    truncated: bool
    advantage: float
    token_ids: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    engine_log_probs: tuple[float, ...] = ()
    trainer_log_probs: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    mask: tuple[int, ...] = ()
    weights_version: int = 0

    def as_row(self) -> dict[str, Any]:
        """The fields as JSON values; numbers of tokens rounded to five digits behind the point."""
        row = dict(vars(self))
        row["scores"] = dict(self.scores)
        for name in PER_TOKEN:
            row[name] = [round(value, DIGITS) for value in row[name]]
        return row


def token_texts(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each token, so that together they are the text of all.

    A token's text may depend on the one before it (spaces of SentencePiece), and a character may take several tokens:
    its last one then has it.
    """
    texts: list[str] = []
    before: list[int] = []
    held: list[int] = []
    for token in ids:
        held.append(token)
        text = decode([*before, *held])[len(decode(before)) if before else 0 :]
        if text.endswith(UNFINISHED) and len(held) < LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text)
        before, held = held, []
    if held and texts:
        texts[-1] = decode([*before, *held])[len(decode(before)) if before else 0 :]
    return texts


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

    def write(self, step: int, rollouts: Iterable[Rollout], *, count: int) -> Path | None:
        """Write the file of `step`, over an earlier one of the same step; None when `max_step_bytes` is 0.

        Of `count` rollouts those that do not fit are not even made.
        """
        if self._max_step_bytes == 0:
            return None
        path = self._folder / f"{self._name}-{step:06d}.jsonl"
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(b"".join(self._lines(rollouts, count)))
        os.replace(partial, path)
        self._remove_oldest(path)
        return path

    def _lines(self, rollouts: Iterable[Rollout], count: int) -> list[bytes]:
        lines: list[bytes] = []
        used = 0
        for rollout in rollouts:
            line = json.dumps(rollout.as_row(), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
            if used + len(line) > self._max_step_bytes:
                break
            lines.append(line)
            used += len(line)
        if len(lines) < count:
            lines.append(json.dumps({"left_out": count - len(lines)}).encode() + b"\n")
        return lines

    def _remove_oldest(self, newest: Path) -> None:
        files = sorted(path for path in self._folder.glob(f"{self._name}-*.jsonl") if path != newest)
        total = newest.stat().st_size + sum(path.stat().st_size for path in files)
        for path in files:
            if total <= self._max_total_bytes:
                return
            total -= path.stat().st_size
            path.unlink()
