"""What the folders of finished runs say: scores of every item, tokens, seconds, command and versions."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_rewards import RewardSample, exact_answer, symbolic_answer
from rft_trainer.errors import ConfigurationError
from rft_trainer.trainer.estimates import pass_at_k

EXTRACTORS = ("strict", "flexible", "symbolic")
PASS_AT = 8


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Shares of right answers by extractor; None: not measured.

    Attributes:
        items: problems.
        greedy: one greedy answer to each problem.
        sampled: mean over the sampled answers, which is pass@1 of sampling.
        best: pass@8, estimated without bias from the sampled answers.
    """

    items: int
    greedy: Mapping[str, float | None]
    sampled: Mapping[str, float | None]
    best: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a run took, over all its devices; seconds are device-seconds.

    `warm_start_tokens` are those of prompts and answers; `sampled_tokens` those of all responses of the rounds.
    """

    warm_start_steps: int
    warm_start_tokens: int
    warm_start_seconds: float
    rounds: int
    sampled_tokens: int
    reinforcement_seconds: float
    evaluation_seconds: float
    whole_seconds: float


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run's folder, read.

    `accuracies` are by step; step 0 is before reinforcement and behind a warm start.
    """

    folder: Path
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    warm_start: Mapping[str, Any] | None
    accuracies: Mapping[int, Accuracy]
    cost: Cost


def read_run(folder: Path) -> RunRecord:
    """Read the folder of a finished run.

    Raises:
        ConfigurationError: it holds no finished run, or no evaluation.
    """
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        warm_file = folder / "warm_start.json"
        warm = json.loads(warm_file.read_text(encoding="utf-8")) if warm_file.is_file() else None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder} holds no finished run: {error}") from error
    return RunRecord(
        folder=folder,
        settings=settings,
        summary=summary,
        warm_start=warm,
        accuracies=_accuracies(folder, settings),
        cost=_cost(rows, summary, warm),
    )


def reinforcement_seconds(folder: Path) -> float:
    """Seconds of all rounds of a run, by its first rank's clock; evaluation, start and warm start are not in them.

    Raises:
        ConfigurationError: the folder has no metrics, or no round.
    """
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"{folder} holds no run: {error}") from error
    seconds = _total(map(json.loads, lines), "perf/seconds_step")
    if seconds <= 0:
        raise ConfigurationError(f"{folder}: no round of reinforcement was run there, so there is no time to match")
    return seconds


def _total(rows: Iterable[Mapping[str, Any]], name: str) -> float:
    return sum(float(row.get(name, 0.0)) for row in rows)


def _sampled_tokens(row: Mapping[str, Any]) -> float:
    if "rollout/sampled_tokens" in row:
        return float(row["rollout/sampled_tokens"])
    responses = float(row.get("rollout/responses", 0.0))
    return float(row["rollout/response_length"]) * responses if responses else 0.0


def _cost(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], warm: Mapping[str, Any] | None) -> Cost:
    ranks = int(summary.get("ranks", 1))
    warm = warm or {"steps": 0, "tokens": 0, "seconds": 0.0}
    return Cost(
        warm_start_steps=int(warm["steps"]),
        warm_start_tokens=int(warm["tokens"]),
        warm_start_seconds=ranks * float(warm["seconds"]),
        rounds=sum("perf/seconds_step" in row for row in rows),
        sampled_tokens=round(sum(map(_sampled_tokens, rows))),
        reinforcement_seconds=ranks * _total(rows, "perf/seconds_step"),
        evaluation_seconds=ranks * _total(rows, "perf/seconds_evaluate"),
        whole_seconds=ranks * float(summary.get("seconds", 0.0)),
    )


def _accuracies(folder: Path, settings: Mapping[str, Any]) -> dict[int, Accuracy]:
    """By step; the plain set is greedy unless the run sampled in evaluations."""
    files: dict[tuple[str, int], list[Path]] = defaultdict(list)
    for file in sorted((folder / "evaluation").glob("*.jsonl*")):
        found = re.fullmatch(r"(eval|greedy)_(\d{6})\.rank\d+\.jsonl(\.gz)?", file.name)
        if found is not None:
            files[found[1], int(found[2])].append(file)
    if not files:
        raise ConfigurationError(f"{folder}: no evaluation of --eval_dataset is there; a card is made of its items")
    sampled = float(settings.get("eval_temperature", 0.0)) > 0
    made: dict[int, Accuracy] = {}
    for step in sorted({step for _, step in files}):
        plain = _scores(files["eval", step])
        greedy = _scores(files["greedy", step]) if sampled else plain
        made[step] = Accuracy(
            items=len(plain[EXTRACTORS[0]]),
            greedy=_each(greedy, _mean),
            sampled=_each(plain if sampled else {}, _mean),
            best=_each(plain if sampled else {}, _best),
        )
    return made


def _each(scores: Mapping[str, Sequence[Sequence[float]]], figure: Any) -> dict[str, float | None]:
    return {name: figure(scores.get(name) or []) for name in EXTRACTORS}


def _mean(items: Sequence[Sequence[float]]) -> float | None:
    return sum(sum(item) / len(item) for item in items) / len(items) if items else None


def _best(items: Sequence[Sequence[float]]) -> float | None:
    if not items or min(map(len, items)) < PASS_AT:
        return None
    return sum(pass_at_k(len(item), sum(score >= 1 for score in item), PASS_AT) for item in items) / len(items)


def _scores(files: Sequence[Path]) -> dict[str, list[list[float]]]:
    """By extractor, the scores of each item's responses; what the run did not extract is extracted now."""
    rows = [row for file in files for row in _rows(file)]
    if not rows:
        return {}
    columns = {name: _column(rows, name) for name in EXTRACTORS}
    scores: dict[str, list[list[float]]] = {}
    for name, column in columns.items():
        items: dict[int, list[float]] = defaultdict(list)
        for row, score in zip(rows, column, strict=True):
            items[row["item"]].append(score)
        scores[name] = [items[item] for item in sorted(items)]
    return scores


def _rows(file: Path) -> list[dict[str, Any]]:
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in content.decode("utf-8").splitlines()]


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    key = f"accuracy_{name}"
    if all(key in row.get("extracted", {}) for row in rows):
        return [float(row["extracted"][key]["score"]) for row in rows]
    extract = symbolic_answer() if name == "symbolic" else exact_answer(name)  # type: ignore[arg-type]
    samples = [RewardSample(row["response"], reference=row["reference"]) for row in rows]
    return [float(score.value or 0.0) for score in extract(samples)]
