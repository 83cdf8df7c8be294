"""The rollouts and curves of a run as one HTML file that a browser opens without a server or network."""

import base64
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rft_trainer.errors import ConfigurationError
from rft_trainer.report.curves import curve_svg

MAIN_METRICS = (
    "rollout/reward",
    "rollout/accuracy",
    "rollout/response_length",
    "rollout/truncated",
    "rollout/mixed_groups",
    "train/kl",
    "train/entropy",
    "train/grad_norm",
    "train/clip_fraction",
    "train/gap/gap",
    "perf/seconds_step",
    "perf/tokens_per_second",
)
"""Curves of these, of those that the run has, and of all `eval/` means stand in the page."""

QUESTION_LENGTH = 160
"""Characters of a prompt's end that the list shows: a prompt's question is behind its system message."""
_CHAT_MARK = re.compile(r"<\|[\w-]+\|>|\n")
_SPEAKERS = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was written: the page, its curves as files, and how many of the rollouts found room."""

    page: Path
    curves: list[Path]
    rollouts: int
    left_out: int


def write_report(run: Path, *, max_mib: float = 64.0) -> Report:
    """Write `report.html` and `curves/*.svg` into the folder of a run, over those of an earlier call.

    The page holds whole groups of responses up to `max_mib` of data; when not all fit, every step keeps its share.

    Raises:
        ConfigurationError: the folder holds no run, or cannot be written.
    """
    if not (run / "metrics.jsonl").is_file() and not (run / "rollouts").is_dir():
        raise ConfigurationError(f"{run} holds neither metrics.jsonl nor rollouts/: give the output folder of a run")
    # A warm start counts its own steps, in a file of its own.
    found = {**read_curves(run / "warm_start.jsonl"), **read_curves(run / "metrics.jsonl")}
    pictures = {name: curve_svg(name, *points) for name, points in found.items()}
    rows, left_out = read_rollouts(run / "rollouts", int(max_mib * 2**20))
    shown = [name for name in pictures if name in MAIN_METRICS or _is_evaluation(name)]
    shown.sort(key=lambda name: (MAIN_METRICS.index(name) if name in MAIN_METRICS else len(MAIN_METRICS), name))
    facts = f"{len(rows)} responses" + (f", {left_out} more in the run found no room here" if left_out else "")
    text = _page(run.resolve().name, facts, [pictures[name] for name in shown], rows)
    try:
        curves = _write_curves(run / "curves", pictures)
        page = run / "report.html"
        # A response may hold half of a surrogate pair, which UTF-8 cannot.
        page.write_bytes(text.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigurationError(f"the report of {run} cannot be written: {error}") from error
    return Report(page=page, curves=curves, rollouts=len(rows), left_out=left_out)


def read_curves(file: Path) -> dict[str, tuple[list[int], list[float]]]:
    """By metric its steps and values, as JsonlLogger wrote them."""
    curves: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    if not file.is_file():
        return {}
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the run may be writing this line just now
        for name, value in row.items():
            if name != "step":
                curves[name][0].append(row["step"])
                curves[name][1].append(float(value))
    return dict(curves)


def read_rollouts(folder: Path, max_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """The rollouts of all ranks by step, whole groups within `max_bytes`, and the number of those that had no room."""
    steps: dict[int, list[Path]] = defaultdict(list)
    for file in sorted(folder.glob("*-*.jsonl")):
        steps[int(file.stem.rpartition("-")[2])].append(file)
    rows: list[dict[str, Any]] = []
    left_out = 0
    for done, step in enumerate(sorted(steps)):
        budget = max_bytes // (len(steps) - done)
        for file in steps[step]:
            groups, missing = _groups_of(file, step)
            left_out += missing
            for group in groups:
                size = sum(len(line) for _, line in group)
                if size > budget:
                    left_out += len(group)
                    continue
                budget -= size
                max_bytes -= size
                rows += [row for row, _ in group]
    return rows, left_out


def _groups_of(file: Path, step: int) -> tuple[list[list[tuple[dict[str, Any], str]]], int]:
    groups: dict[Any, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    missing = 0
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "left_out" in row:
            missing += row["left_out"]
        else:
            groups[row["group"], row["prompt_id"]].append(({"step": step, **row}, line))
    return list(groups.values()), missing


def _grouped(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The responses to each prompt of each step, by the name that the page's address has for them."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[f"{row['step']}/{row['group']}"].append(row)
    return groups


def _index(groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """What the list and its filters need of each group; one entry of a list for each response."""
    return [
        {
            "key": key,
            "step": rows[0]["step"],
            "prompt_id": rows[0]["prompt_id"],
            "label": "" if rows[0].get("label") == "default" else rows[0].get("label", ""),
            "question": _question(rows[0]["prompt"]),
            "rewards": [row["reward"] for row in rows],
            "lengths": [row["length"] for row in rows],
            "truncated": [int(row["truncated"]) for row in rows],
        }
        for key, rows in groups.items()
    ]


def _question(prompt: str) -> str:
    """The end of what a person asked: without the marks of a chat, which are alike in every prompt."""
    turns = [turn.strip() for turn in _CHAT_MARK.split(prompt)]
    said = [turn for turn in turns if turn and turn not in _SPEAKERS]
    return " ".join((said[-1] if said else prompt).split())[-QUESTION_LENGTH:]


def _packed(value: Sequence[Any]) -> str:
    """What the page unpacks when it is asked for: JSON, deflated, in base64, in which no markup can stand."""
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    # A response may hold half of a surrogate pair, which UTF-8 cannot.
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return base64.b64encode(deflate.compress(text.encode("utf-8", "replace")) + deflate.flush()).decode()


def _page(title: str, facts: str, curves: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> str:
    assets = files("rft_trainer.report") / "assets"
    groups = _grouped(rows)
    parts = {
        "title": escape(title),
        "facts": escape(facts),
        "style": (assets / "page.css").read_text(encoding="utf-8"),
        "script": (assets / "page.js").read_text(encoding="utf-8"),
        "curves": "".join(curves),
        "index": _inert(_index(groups)),
        "groups": "\n".join(map(_packed, groups.values())),
        "texts": _packed([[rows[0]["prompt"], *(row["response"] for row in rows)] for rows in groups.values()]),
    }
    pieces = (assets / "page.html").read_text(encoding="utf-8").split("{{")
    # Split once, so that braces in the data are never taken for a place.
    return pieces[0] + "".join(parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:]))


def _inert(value: Any) -> str:
    """JSON without `<`, so that nothing in it can end its script element or begin another."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    """JSON has no form for numbers that are not finite: they become null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_evaluation(name: str) -> bool:
    return name.startswith("eval/") and "/counts/" not in name and not name.endswith(("_low", "_high", "/items"))


def _write_curves(folder: Path, pictures: Mapping[str, str]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    written = []
    for name, picture in pictures.items():
        file = folder / (name.replace("/", "-") + ".svg")
        file.write_text(picture, encoding="utf-8")
        written.append(file)
    return written
