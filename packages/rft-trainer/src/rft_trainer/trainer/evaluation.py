"""Evaluation: the generation and reward path of training, every item once, nothing of the training state changed."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rft_dist import Mean, Sum
from rft_engines import SamplingParams
from rft_rewards import ExactAnswer, Grader, RewardSample, Score
from rft_trainer.checkpoint.random_state import kept_random_state
from rft_trainer.data import EncodedPrompt
from rft_trainer.experience.experience import Experience, reward_sample
from rft_trainer.experience.maker import FastExperienceMaker
from rft_trainer.strategy.protocols import DataParallel
from rft_trainer.trainer.estimates import interval, majority_share, pass_at_k

# Evaluations draw from seeds of their own, the same ones at every step: what differs between two of them is the model.
_STREAM = -1


class Extractor(Protocol):
    """Finds an answer in each response and scores it; the diagnostic `answer` is what was found."""

    @property
    def name(self) -> str: ...

    def __call__(self, samples: Sequence[RewardSample], /) -> Sequence[Score]: ...


def three_extractors(grader: Grader | None = None) -> tuple[ExactAnswer, ...]:
    """Accuracy by each place where an answer may be looked for; the same responses can differ by tens of points."""
    return tuple(
        ExactAnswer(policy=policy, grader=grader, name=f"accuracy_{policy}")
        for policy in ("strict", "flexible", "boxed")
    )


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Scores whole sets; rank r takes items r, r + world, r + 2 world, ... of each.

    Attributes:
        sets: by name; the same on every rank. Metrics of the set "" stand under `eval/`, others under `eval/NAME/`.
        sampling: greedy unless the caller wants otherwise; `n` responses to each item.
        greedy: besides, one greedy response to each item of every set; the set NAME is then scored as NAME_greedy too,
            and "" as "greedy".
        extractors: further scores of each response, which no reward pays; they need a reference in every item.
        pass_at: numbers k of pass@k; those above the number of responses are left out.
        majority: score the most frequent answer of each item, by each extractor.
        grader: tells which answers are the same.
        folder: per-response results go to NAME_<step>.rank<r>.jsonl here ("eval" for ""); None keeps none.
    """

    sets: Mapping[str, Sequence[EncodedPrompt]]
    sampling: SamplingParams
    maker: FastExperienceMaker
    data: DataParallel
    greedy: bool = False
    extractors: Sequence[Extractor] = ()
    pass_at: Sequence[int] = ()
    majority: bool = False
    grader: Grader = field(default_factory=Grader)
    folder: Path | None = None

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics under `eval/`, equal on all ranks and for every number of them. Collective over the world."""
        metrics: dict[str, float] = {}
        with kept_random_state():
            for number, (name, records, sampling) in enumerate(self._passes()):
                metrics.update(self._evaluate_set(step, number, name, records, sampling))
        return metrics

    def _passes(self) -> list[tuple[str, Sequence[EncodedPrompt], SamplingParams]]:
        """Name, items and sampling of each pass; greedy ones come last, so that they change no seed of the others."""
        passes = [(name, records, self.sampling) for name, records in self.sets.items()]
        if self.greedy:
            single = replace(self.sampling, n=1, temperature=0.0, top_p=1.0, top_k=0)
            passes += [(f"{name}_greedy" if name else "greedy", items, single) for name, items in self.sets.items()]
        return passes

    def _evaluate_set(
        self, step: int, number: int, name: str, records: Sequence[EncodedPrompt], sampling: SamplingParams
    ) -> dict[str, float]:
        mine = list(range(self.data.rank, len(records), self.data.size))
        experiences = self.maker.rollout(mine, [records[i] for i in mine], sampling, step=_STREAM - number)
        self.maker.reward(experiences)
        extracted = self._extract(experiences)
        if self.folder is not None:
            self._keep(step, name, experiences, extracted, sampling.n)
        prefix = f"eval/{name}/" if name else "eval/"
        values = _item_values(experiences, extracted, sampling.n, self.pass_at)
        if self.majority:
            values.update(self._majorities(extracted, sampling.n))
        counts: dict[str, Any] = {f"counts/{event}": count for event, count in self.maker.take_reward_counts().items()}
        reduced = self.data.reduce_metrics({**_sums(values), **_plain(experiences, extracted), **counts})
        return {prefix + key: value for key, value in _with_intervals(reduced).items()}

    def _extract(self, experiences: Sequence[Experience]) -> dict[str, list[tuple[str | None, float]]]:
        """By extractor, the answer that it finds in each response and its score."""
        samples = [reward_sample(e) for e in experiences]
        return {
            extractor.name: [(score.diagnostics["answer"], float(score.value or 0)) for score in extractor(samples)]
            for extractor in self.extractors
        }

    def _majorities(
        self, extracted: Mapping[str, Sequence[tuple[str | None, float]]], n: int
    ) -> dict[str, list[float]]:
        return {
            f"{name}_majority": [
                majority_share([answer for answer, _ in group], [score >= 1 for _, score in group], self.grader)
                for group in _groups(found, n)
            ]
            for name, found in extracted.items()
        }

    def _keep(
        self,
        step: int,
        name: str,
        experiences: Sequence[Experience],
        extracted: Mapping[str, Sequence[tuple[str | None, float]]],
        n: int,
    ) -> None:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{name or 'eval'}_{step:06d}.rank{self.data.rank}.jsonl"
        with file.open("w", encoding="utf-8", errors="backslashreplace") as stream:
            for index, experience in enumerate(experiences):
                row = {
                    "item": experience.group,
                    "sample": index % n,
                    "id": experience.prompt_id,
                    "prompt": experience.prompt,
                    "response": experience.response,
                    "reference": experience.reference,
                    "scores": dict(experience.scores),
                    "reward": experience.reward,
                    "tokens": len(experience.response_ids),
                    "truncated": experience.truncated,
                    "extracted": {
                        key: {"answer": found[index][0], "score": found[index][1]} for key, found in extracted.items()
                    },
                }
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def _item_values(
    experiences: Sequence[Experience],
    extracted: Mapping[str, Sequence[tuple[str | None, float]]],
    n: int,
    pass_at: Sequence[int],
) -> dict[str, list[float]]:
    """By metric, one value for each item of this rank: the mean over its n responses, or what k of them would reach."""
    columns: dict[str, list[list[float]]] = defaultdict(list)
    for group in _groups(experiences, n):
        for name in sorted({name for e in group for name in e.scores}):
            columns[name].append([e.scores[name] for e in group])
    for name, found in extracted.items():
        columns[name] = [[score for _, score in group] for group in _groups(found, n)]
    values: dict[str, list[float]] = {"reward": [sum(e.reward for e in g) / n for g in _groups(experiences, n)]}
    for name, rows in columns.items():
        values[name] = [sum(row) / len(row) for row in rows]
        for k in (k for k in pass_at if k <= n):
            values[f"{name}_pass_at_{k}"] = [pass_at_k(len(row), sum(score >= 1 for score in row), k) for row in rows]
    return values


def _groups(rows: Sequence[Any], n: int) -> Iterator[Sequence[Any]]:
    return (rows[start : start + n] for start in range(0, len(rows), n))


def _plain(
    experiences: Sequence[Experience], extracted: Mapping[str, Sequence[tuple[str | None, float]]]
) -> dict[str, Mean | Sum]:
    """Means over responses that need no interval."""
    count = len(experiences)
    plain: dict[str, Mean | Sum] = {
        "response_length": Mean(sum(len(e.response_ids) for e in experiences), count),
        "truncated": Mean(sum(e.truncated for e in experiences), count),
    }
    for name, found in extracted.items():
        policy = name.removeprefix("accuracy_")
        plain[f"unanswered_{policy}"] = Mean(sum(answer is None for answer, _ in found), count)
    return plain


_SQUARE, _COUNT = " squares", " items"


def _sums(values: Mapping[str, Sequence[float]]) -> dict[str, Mean | Sum]:
    sums: dict[str, Mean | Sum] = {}
    for name, column in values.items():
        sums[name] = Mean(sum(column), len(column))
        sums[name + _SQUARE] = Mean(sum(value * value for value in column), len(column))
        sums[name + _COUNT] = Sum(float(len(column)))
    return sums


def _with_intervals(reduced: Mapping[str, float]) -> dict[str, float]:
    """The means, each with the ends of its 95 % interval."""
    metrics = {name: value for name, value in reduced.items() if not name.endswith((_SQUARE, _COUNT))}
    for name in [name for name in metrics if name + _COUNT in reduced]:
        ends = interval(metrics[name], reduced[name + _SQUARE], int(reduced[name + _COUNT]))
        metrics[f"{name}_low"], metrics[f"{name}_high"] = ends
    metrics["items"] = reduced["reward" + _COUNT]
    return metrics
