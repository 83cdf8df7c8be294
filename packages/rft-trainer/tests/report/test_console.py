"""The console: one line a step everywhere, bars on terminals alone, nothing on other ranks."""

import io

import pytest

from rft_trainer.report import Column, Console

COLUMNS = (Column("reward/mean", "reward"), Column("time/generate", "generate", ".1f"))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_step_is_one_line_with_its_figures():
    stream = io.StringIO()
    console = Console(stream=stream, columns=COLUMNS)
    console.step_line(3, {"reward/mean": 0.25, "time/generate": 11.26}, total_steps=8)
    console.step_line(4, {"reward/mean": 1.0})
    assert stream.getvalue() == ("step 3/8  reward 0.250  generate 11.3\nstep 4  reward 1.000  generate -\n")


def test_long_lines_are_not_broken_and_brackets_stay():
    stream = io.StringIO()
    Console(stream=stream).line("[red] " + "x" * 300)
    assert stream.getvalue() == "[red] " + "x" * 300 + "\n"


def test_no_bar_without_a_terminal():
    stream = io.StringIO()
    with Console(stream=stream).phase("generate", total=2) as progress:
        progress.advance()
    assert stream.getvalue() == ""


def test_a_bar_counts_on_a_terminal_and_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console(stream=stream)
    with console.phase("iteration"), console.phase("generate [x]", total=2) as progress:
        progress.advance(2)
    assert "generate [x]" in stream.getvalue()
    assert "2/2" in stream.getvalue()
    assert console._progress is None


def test_a_failing_phase_frees_the_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = Console(stream=Terminal())
    with pytest.raises(RuntimeError, match="broken"), console.phase("generate"):
        raise RuntimeError("broken")
    assert console._progress is None


def test_other_ranks_are_silent():
    stream = Terminal()
    console = Console(enabled=False, stream=stream, columns=COLUMNS)
    with console.phase("generate") as progress:
        progress.advance()
    console.step_line(1, {})
    console.line("x")
    console.table("summary", [("accuracy", "0.5")])
    assert stream.getvalue() == ""


def test_a_table_lists_names_and_values():
    stream = io.StringIO()
    Console(stream=stream).table("Summary [1]", [("base accuracy", "0.41"), ("metrics", "out/metrics.jsonl")])
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[0] == "Summary [1]"
    assert lines[1].split() == ["base", "accuracy", "0.41"]
    assert lines[2].split() == ["metrics", "out/metrics.jsonl"]


def test_the_time_that_is_left(monkeypatch):
    stream = io.StringIO()
    console = Console(stream=stream, columns=())
    now = iter([100.0, 110.0, 190.0, 250.0])
    monkeypatch.setattr("rft_trainer.report.console.time.monotonic", lambda: next(now))
    for step in (5, 6, 8, 10):
        console.step_line(step, {}, total_steps=10)
    # 10 s a step leaves 40 s for four; 30 s a step on the mean leaves a minute for two.
    assert stream.getvalue().splitlines() == [
        "step 5/10",
        "step 6/10  left 0:00:40",
        "step 8/10  left 0:01:00",
        "step 10/10",
    ]
