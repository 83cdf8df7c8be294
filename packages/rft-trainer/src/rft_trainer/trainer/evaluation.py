"""Evaluation: the generation and reward path of training, every item once, greedy, nothing updated."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rft_dist import Mean
from rft_engines import SamplingParams
from rft_trainer.data import EncodedPrompt
from rft_trainer.experience.experience import Experience
from rft_trainer.experience.maker import FastExperienceMaker
from rft_trainer.strategy.protocols import DataParallel


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Scores a whole split; rank r takes items r, r + world, r + 2 world, ...

    Attributes:
        records: the split, the same on every rank.
        sampling: greedy unless the caller wants otherwise.
        folder: per-item results go to eval_<step>.rank<r>.jsonl here; None keeps none.
    """

    records: Sequence[EncodedPrompt]
    sampling: SamplingParams
    maker: FastExperienceMaker
    data: DataParallel
    folder: Path | None = None

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics under `eval/`, equal on all ranks. Collective over the world."""
        mine = list(range(self.data.rank, len(self.records), self.data.size))
        experiences = self.maker.rollout(mine, [self.records[i] for i in mine], self.sampling, step=step)
        self.maker.reward(experiences)
        if self.folder is not None:
            self._keep(step, experiences)
        counts = {f"eval/counts/{name}": count for name, count in self.maker.take_reward_counts().items()}
        return self.data.reduce_metrics({**evaluation_metrics(experiences), **counts})

    def _keep(self, step: int, experiences: Sequence[Experience]) -> None:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"eval_{step:06d}.rank{self.data.rank}.jsonl").open("w") as stream:
            for experience in experiences:
                row = {
                    "item": experience.group,
                    "id": experience.prompt_id,
                    "response": experience.response,
                    "reference": experience.reference,
                    "scores": dict(experience.scores),
                    "reward": experience.reward,
                    "tokens": len(experience.response_ids),
                    "truncated": experience.truncated,
                }
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def evaluation_metrics(experiences: Sequence[Experience]) -> dict[str, Mean]:
    """Sample means under `eval/`, with their counts: reward, each score, length, truncated share."""
    count = len(experiences)
    metrics = {
        "eval/reward": Mean(sum(e.reward for e in experiences), count),
        "eval/response_length": Mean(sum(len(e.response_ids) for e in experiences), count),
        "eval/truncated": Mean(sum(e.truncated for e in experiences), count),
    }
    for name in sorted({name for e in experiences for name in e.scores}):
        scored = [e.scores[name] for e in experiences if name in e.scores]
        metrics[f"eval/{name}"] = Mean(sum(scored), len(scored))
    return metrics
