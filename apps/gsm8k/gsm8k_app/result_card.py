"""A card of results from the folders of runs: accuracies over seeds, costs, commands, versions and curves."""

import json
import re
import shlex
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsm8k_app.run_records import EXTRACTORS, PASS_AT, Accuracy, RunRecord, read_run
from rft_trainer.errors import ConfigurationError
from rft_trainer.report.page import write_report

NOT_RUN = "not run"
CURVES = (
    "rollout/reward",
    "rollout/accuracy",
    "rollout/sampled_score",
    "rollout/response_length",
    "train/kl",
    "train/entropy",
    "train/gap/gap",
)
_PLACES = ("dataset", "eval_dataset", "pretrain", "output_dir", "config", "resume_from")


@dataclass(frozen=True, kw_only=True)
class SeedRuns:
    """The runs of one seed; None: not run. `base` evaluates the model as it came."""

    seed: str
    base: RunRecord | None
    reinforcement: RunRecord | None
    control: RunRecord | None


def read_seeds(root: Path) -> list[SeedRuns]:
    """The runs below `root`, by seed.

    `seed_N` is the folder of a run, or holds the runs `reinforcement`, `control` and `base`; `base` beside the seeds
    stands for all of them.

    Raises:
        ConfigurationError: there is no seed, or a run is not finished.
    """
    folders = sorted(root.glob("seed_*"), key=lambda folder: [int(n) for n in re.findall(r"\d+", folder.name)])
    if not folders:
        raise ConfigurationError(f"{root}: no folder seed_N with runs is there")

    def run(folder: Path) -> RunRecord | None:
        return read_run(folder) if (folder / "metrics.jsonl").is_file() else None

    shared = run(root / "base")
    return [
        SeedRuns(
            seed=folder.name.removeprefix("seed_"),
            base=run(folder / "base") or shared,
            reinforcement=run(folder) or run(folder / "reinforcement"),
            control=run(folder / "control"),
        )
        for folder in folders
    ]


def stages(runs: SeedRuns) -> dict[str, Accuracy | None]:
    """By stage what a seed scored: base, warm start, reinforcement, control."""
    main, control = runs.reinforcement, runs.control
    first = None if main is None else main.accuracies.get(0)
    warmed = main is not None and main.warm_start is not None
    last = None if main is None else max((step for step in main.accuracies if step > 0), default=None)
    base = None if runs.base is None else runs.base.accuracies.get(0)
    return {
        "base": base if warmed or base is not None else first,
        "warm start": first if warmed else None,
        "reinforcement": None if main is None or last is None else main.accuracies[last],
        "control": None if control is None else control.accuracies[max(control.accuracies)],
    }


def card(seeds: Sequence[SeedRuns], *, title: str) -> str:
    """The card as Markdown, without its curves."""
    scored = {runs.seed: stages(runs) for runs in seeds}
    known = [accuracy for stage in scored.values() for accuracy in stage.values() if accuracy is not None]
    counts = sorted({accuracy.items for accuracy in known})
    facts = f"{' and '.join(map(str, counts))} problems, shares of right answers in per cent"
    parts = [f"## {title}", "", f"{facts}; the spread is the sample standard deviation of the seeds."]
    measures: tuple[tuple[str, Callable[[Accuracy], Mapping[str, float | None]]], ...] = (
        ("Greedy, pass@1", lambda accuracy: accuracy.greedy),
        ("Sampled, pass@1", lambda accuracy: accuracy.sampled),
        (f"Sampled, pass@{PASS_AT}", lambda accuracy: accuracy.best),
    )
    for name, measure in measures:
        is_run = any(value is not None for accuracy in known for value in measure(accuracy).values())
        parts += [
            "",
            f"### {name}",
            "",
            *(_accuracy_table(scored, measure) if is_run else [f"{NOT_RUN.capitalize()}."]),
        ]
    parts += ["", "### Cost", "", "Seconds are device-seconds.", "", *_cost_table(seeds)]
    parts += ["", "### Made with", "", *_provenance(seeds)]
    return "\n".join(parts) + "\n"


def _accuracy_table(
    scored: Mapping[str, Mapping[str, Accuracy | None]], measure: Callable[[Accuracy], Mapping[str, float | None]]
) -> list[str]:
    rows: list[list[str]] = []
    for extractor in EXTRACTORS:
        values: dict[str, list[float | None]] = {}
        for stage in ("base", "warm start", "reinforcement", "control"):
            found = [scored[seed][stage] for seed in scored]
            values[stage] = [None if accuracy is None else measure(accuracy)[extractor] for accuracy in found]
            rows.append([stage, extractor, *_shares(values[stage])])
        start = "warm start" if any(value is not None for value in values["warm start"]) else "base"
        for before in (start, "control"):
            gains = _differences(values["reinforcement"], values[before])
            rows.append([f"reinforcement over {before}", extractor, *_shares(gains, signed=True)])
    return _table(["stage", "extractor", *(f"seed {seed}" for seed in scored), "mean", "spread"], rows)


def _differences(after: Sequence[float | None], before: Sequence[float | None]) -> list[float | None]:
    pairs = zip(after, before, strict=True)
    return [None if late is None or early is None else late - early for late, early in pairs]


def _shares(values: Sequence[float | None], *, signed: bool = False) -> list[str]:
    """A cell for each seed, mean and spread, in per cent; the mean is over the seeds that were run."""
    form = "{:+.1f}" if signed else "{:.1f}"
    known = [100 * value for value in values if value is not None]
    cells = [NOT_RUN if value is None else form.format(100 * value) for value in values]
    mean = form.format(statistics.fmean(known)) if known else NOT_RUN
    return [*cells, mean, f"{statistics.stdev(known):.1f}" if len(known) > 1 else "-"]


def _cost_table(seeds: Sequence[SeedRuns]) -> list[str]:
    titles = ["run", "supervised steps", "their tokens", "their seconds", "rounds", "sampled tokens", "their seconds"]
    titles += ["evaluation", "whole run"]
    rows = []
    for runs in seeds:
        for name in ("reinforcement", "control"):
            record: RunRecord | None = getattr(runs, name)
            if record is None:
                rows.append([f"seed {runs.seed}, {name}", *[NOT_RUN] * (len(titles) - 1)])
                continue
            cost = record.cost
            figures = (
                *(f"{cost.warm_start_steps}", f"{cost.warm_start_tokens:,}", f"{cost.warm_start_seconds:.1f}"),
                *(f"{cost.rounds}", f"{cost.sampled_tokens:,}", f"{cost.reinforcement_seconds:.1f}"),
                *(f"{cost.evaluation_seconds:.1f}", f"{cost.whole_seconds:.1f}"),
            )
            rows.append([f"seed {runs.seed}, {name}", *figures])
    return _table(titles, rows)


def _provenance(seeds: Sequence[SeedRuns]) -> list[str]:
    lines: list[str] = []
    for name in ("base", "reinforcement", "control"):
        records = [record for runs in seeds if (record := getattr(runs, name)) is not None]
        if not records:
            lines.append(f"- {name}: {NOT_RUN}")
            continue
        summary = records[0].summary
        command = f"torchrun --nproc_per_node {summary['ranks']} apps/gsm8k {_shown_command(summary['command'])}"
        lines.append(f"- {name}: `{command}`")
    known = [record for runs in seeds for record in (runs.base, runs.reinforcement, runs.control) if record is not None]
    devices = {f"{record.summary['ranks']} x {record.summary['device']}": None for record in known}
    lines.append(f"- devices: {'; '.join(devices)}")
    versions = {json.dumps(record.summary["versions"]): record.summary["versions"] for record in known}
    shown = (", ".join(f"{package} {number}" for package, number in made.items()) for made in versions.values())
    return [*lines, *(f"- versions: {text}" for text in shown)]


def _shown_command(arguments: Sequence[str]) -> str:
    """The flags as given; of files and folders the last part, since the rest belongs to one machine."""
    shown: list[str] = []
    for number, argument in enumerate(arguments):
        flag = arguments[number - 1].lstrip("-").replace("-", "_") if number else ""
        shown.append(_last_part(argument) if flag in _PLACES else argument)
    return shlex.join(shown)


def _last_part(place: str) -> str:
    path = Path(place)
    return "/".join(path.parts[-2:]) if path.is_absolute() or ".." in path.parts else place


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def keep_files(seeds: Sequence[SeedRuns], folder: Path) -> list[str]:
    """Copy settings and curves of the runs into `folder`; the lines of Markdown that show them.

    The settings are those of one run of each kind, places shortened as in its command; the curves are those of the
    report of each seed's run.
    """
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    lines: list[str] = []
    for name in ("base", "reinforcement", "control"):
        record: RunRecord | None = next((r for runs in seeds if (r := getattr(runs, name)) is not None), None)
        if record is not None:
            file = folder / f"{name}.json"
            file.write_text(json.dumps(_shown_settings(record.settings), indent=1) + "\n", encoding="utf-8")
            lines.append(f"- settings, {name}: [{file.name}]({folder.name}/{file.name})")
    for runs in seeds:
        if runs.reinforcement is not None:
            lines += ["", f"Curves of seed {runs.seed}:", "", *_copied_curves(runs.reinforcement, folder, runs.seed)]
    return lines


def _copied_curves(record: RunRecord, folder: Path, seed: str) -> list[str]:
    write_report(record.folder)
    lines = []
    for name in CURVES:
        curve = record.folder / "curves" / f"{name.replace('/', '-')}.svg"
        if curve.is_file():
            copy = folder / f"seed_{seed}-{curve.name}"
            shutil.copyfile(curve, copy)
            lines.append(f"![{name}]({folder.name}/{copy.name})")
    return lines


def _shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _last_part(value) if name in _PLACES and isinstance(value, str) else value
        for name, value in settings.items()
    }


def replace_section(page: str, name: str, text: str) -> str:
    """`page` with `text` between the marks of the section `name`, which is put at the end when it is not there."""
    begin, end = f"<!-- card {name} -->", f"<!-- end of card {name} -->"
    section = f"{begin}\n\n{text.strip()}\n\n{end}"
    if begin not in page:
        return f"{page.rstrip()}\n\n{section}\n".lstrip()
    head, _, rest = page.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ConfigurationError(f"the page has {begin!r} without {end!r} behind it: put it back, or take both out")
    return f"{head}{section}{tail}"
