"""The end of a run: what was gained and where everything lies."""

import json
from collections.abc import Mapping

from rft_trainer.config import RFTConfig
from rft_trainer.trainer.ppo import Progress


def write_summary(config: RFTConfig, evaluations: Mapping[int, Mapping[str, float]], progress: Progress) -> None:
    """Write summary.json and say it in a few lines."""
    folder = config.output_dir
    places = {
        "configuration": folder / "config.json",
        "metrics": folder / "metrics.jsonl",
        "rollouts": folder / "rollouts",
        "evaluation": folder / "evaluation",
        "checkpoints": folder / "checkpoints",
        "model": folder / "model",
    }
    content = {
        "evaluations": {str(step): dict(metrics) for step, metrics in evaluations.items()},
        "places": {name: str(place) for name, place in places.items()},
    }
    (folder / "summary.json").write_text(json.dumps(content, indent=1))
    if evaluations:
        first, last = min(evaluations), max(evaluations)
        shown = ("accuracy", "accuracy_any_form")
        for name in (name for name in evaluations[first] if name.rpartition("/")[2] in shown):
            before, after = evaluations[first][name], evaluations[last][name]
            progress.line(
                f"{name.removeprefix('eval/').replace('_', ' ')}: "
                f"{before:.1%} before, {after:.1%} after step {last} ({after - before:+.1%})"
            )
    for name, place in places.items():
        progress.line(f"{name:14} {place}")
