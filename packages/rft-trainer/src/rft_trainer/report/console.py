"""What a person sees: a spinner for the phase that runs, one line per step."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

# (title, metric, format) of the step line, in its order; metrics that a run does not have are left out.
STEP_LINE = (
    ("reward", "rollout/reward", "{:.3f}"),
    ("accuracy", "rollout/accuracy", "{:.1%}"),
    ("kl", "train/kl", "{:.4f}"),
    ("clip", "train/clip_fraction", "{:.3f}"),
    ("length", "rollout/response_length", "{:.1f}"),
    ("mixed", "rollout/mixed_groups", "{:.0%}"),
    ("gap", "train/gap/gap", "{:.1e}"),
    ("grad", "train/grad_norm", "{:.2f}"),
)
_SECONDS = "perf/seconds_"


class Console:
    """Progress of a run; silent when not `enabled`, without animation when the stream is no terminal."""

    def __init__(self, *, enabled: bool = True, total_steps: int | None = None, stream: TextIO | None = None) -> None:
        self._enabled = enabled
        self._total = total_steps
        self._rich = RichConsole(file=stream or sys.stdout, highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` with a bar and a running clock while the phase lasts."""
        if self._enabled and self._rich.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            with Progress(*columns, console=self._rich, transient=True) as progress:
                progress.add_task(name.replace("_", " "), total=None)
                yield
        else:
            yield

    def step_line(self, step: int, metrics: Mapping[str, float]) -> None:
        """One readable line: what was learnt, then seconds by phase."""
        parts = [f"{title} {form.format(metrics[name])}" for title, name, form in STEP_LINE if name in metrics]
        seconds = {
            name.removeprefix(_SECONDS): value for name, value in metrics.items() if name.startswith(_SECONDS)
        }
        total = seconds.pop("step", sum(seconds.values()))
        phases = " ".join(f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.05)
        of = f"/{self._total}" if self._total is not None else ""
        self.line(f"step {step}{of}  {'  '.join(parts)}  {total:.1f} s ({phases})")

    def line(self, text: str) -> None:
        """Print a line as it is."""
        if self._enabled:
            self._rich.print(text, markup=False)
