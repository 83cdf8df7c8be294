"""Rollouts kept for reading: one JSON line per response, bounded in bytes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rft_trainer.experience.experience import Experience


class RolloutWriter:
    """Writes step_NNNNNN.rank<r>.jsonl under `folder` until `max_bytes` of this rank's share are used.

    A line holds prompt, response, gold answer, reward and its parts, length, truncation, weights version, and per token:
    id, advantage, log-probability of engine and trainer (null where the trainer did not score it apart from its update).
    """

    def __init__(self, folder: Path, *, rank: int, max_bytes: int) -> None:
        self._folder = folder
        self._rank = rank
        self._left = max_bytes

    def write(self, step: int, experiences: Sequence[Experience]) -> None:
        """Append whole responses until the budget is used; a budget of 0 writes nothing."""
        if self._left <= 0 or not experiences:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"step_{step:06d}.rank{self._rank}.jsonl").open("w", encoding="utf-8") as stream:
            for experience in experiences:
                line = json.dumps(_row(step, experience), ensure_ascii=False) + "\n"
                self._left -= len(line.encode())
                if self._left < 0:
                    return
                stream.write(line)


def _row(step: int, experience: Experience) -> dict[str, Any]:
    return {
        "step": step,
        "group": experience.group,
        "prompt": experience.prompt,
        "response": experience.response,
        "reference": experience.reference,
        "reward": experience.reward,
        "scores": dict(experience.scores),
        "tokens": len(experience.response_ids),
        "truncated": experience.truncated,
        "weights_version": experience.weights_version,
        "token_ids": experience.response_ids.tolist(),
        "advantages": _rounded(experience.advantages),
        "engine_log_probs": _rounded(experience.engine_log_probs),
        "trainer_log_probs": _rounded(experience.old_log_probs),
    }


def _rounded(values: Tensor | None) -> list[float] | None:
    return None if values is None else [round(value, 5) for value in values.tolist()]
