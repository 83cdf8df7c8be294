"""What a person sees: a progress bar for each phase on a terminal, one line a step everywhere, on rank 0 alone."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TextIO

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

PLAIN_WIDTH = 200
MISSING = "-"


@dataclass(frozen=True)
class Column:
    """One figure of the step line: the metric it shows, its short name and its format."""

    metric: str
    title: str
    form: str = ".3f"

    def text(self, metrics: Mapping[str, float]) -> str:
        value = metrics.get(self.metric)
        return f"{self.title} {MISSING if value is None else format(value, self.form)}"


class PhaseProgress:
    """The running phase; `advance` moves its bar, and does nothing where no bar is drawn."""

    def __init__(self, progress: Progress | None = None, task: TaskID | None = None) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more units as done."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, amount)


class Console:
    """Prints on one rank and is silent on the others, so callers need no condition on the rank.

    Bars are drawn on a terminal alone; lines and tables are printed everywhere, without colours where the stream is
    no terminal. No method communicates.

    Args:
        enabled: False silences everything (pass `rank == 0`).
        stream: where to print; None means standard output.
        columns: the figures of the step line, in order.
    """

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None, columns: Sequence[Column] = ()) -> None:
        stream = sys.stdout if stream is None else stream
        terminal = stream.isatty()
        self._columns = tuple(columns)
        # A stream that is no terminal has no width of its own: lines are not to be broken at 80.
        width = None if terminal else PLAIN_WIDTH
        self._rich = RichConsole(file=stream, quiet=not enabled, width=width, highlight=False, soft_wrap=not terminal)
        self._draws_bars = enabled and terminal
        self._progress: Progress | None = None
        self._first_step: tuple[int, float] | None = None

    @contextmanager
    def phase(self, name: str, total: float | None = None) -> Iterator[PhaseProgress]:
        """Show a bar named `name` for as long as the context lasts; a phase inside a phase gets a bar below.

        `total` is the number of units that `advance` counts; None shows a moving bar and the time.
        """
        if not self._draws_bars:
            yield PhaseProgress()
            return
        outermost = self._progress is None
        if self._progress is None:
            self._progress = _make_progress(self._rich)
            self._progress.start()
        progress = self._progress
        task = progress.add_task(escape(name), total=total)
        try:
            yield PhaseProgress(progress, task)
        finally:
            progress.refresh()  # the last count, which the timer may not have drawn
            progress.remove_task(task)
            if outermost:
                progress.stop()
                self._progress = None

    def step_line(self, step: int, metrics: Mapping[str, float], *, total_steps: int | None = None) -> None:
        """One line with the console's columns; a metric that is missing shows as a dash.

        With `total_steps` the line ends with the time that the rest will take at the pace of the steps so far.
        """
        count = f"step {step}" if total_steps is None else f"step {step}/{total_steps}"
        rest = [] if total_steps is None else self._time_left(step, total_steps)
        self.line("  ".join([count, *(column.text(metrics) for column in self._columns), *rest]))

    def _time_left(self, step: int, total_steps: int) -> list[str]:
        now = time.monotonic()
        if self._first_step is None:
            self._first_step = (step, now)
            return []
        first, start = self._first_step
        if step <= first or step >= total_steps:
            return []
        seconds = round((now - start) / (step - first) * (total_steps - step))
        return [f"left {timedelta(seconds=seconds)}"]

    def line(self, text: str) -> None:
        """Print one line as it is, above any bar."""
        self._rich.print(escape(text))

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print names and values in two columns under a title, for summaries."""
        table = Table(title=escape(title), title_justify="left", show_header=False, box=None)
        for name, value in rows:
            table.add_row(escape(name), escape(value))
        self._rich.print(table)


def _make_progress(console: RichConsole) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
