"""The order of rounds, evaluations and checkpoints, with parts that only say that they were called."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rft_trainer.config import RFTConfig
from rft_trainer.errors import CheckpointError, RunInterrupted
from rft_trainer.testing import AloneDataParallel
from rft_trainer.trainer import PPOTrainer


class Recorded(PPOTrainer):
    """One whose parts are lines in `calls`; a signal comes during step `stop_at`, an error in step `fail_at`."""

    def __init__(self, calls, *, finished=0, evaluations=(), stop_at=None, fail_at=None, over_at=None, unfinished=None):
        self.calls, self.finished_steps, self.evaluations = calls, finished, {step: {} for step in evaluations}
        self.config = RFTConfig(max_steps=5, eval_steps=2, save_steps=2)
        self.data, self.actor = AloneDataParallel(), None
        self.guard = SimpleNamespace(is_over=lambda: self.finished_steps == over_at)
        self.stop_at, self.fail_at = stop_at, fail_at
        self.runtime = SimpleNamespace(update_engine_weights=lambda actor: calls.append("sync"))
        self.logger = SimpleNamespace(close=lambda: calls.append("closed"))
        self.progress = SimpleNamespace(line=calls.append)
        self.memory = SimpleNamespace(table=lambda: "")
        self.checkpoints = SimpleNamespace(finish_alone=unfinished or (lambda: None), is_writing=False)
        self._clock = lambda name: nullcontext()
        self._clock.restart = lambda: None

    def step(self):
        if self.finished_steps + 1 == self.fail_at:
            raise ZeroDivisionError("in a step")
        self.finished_steps += 1
        self.calls.append(f"step {self.finished_steps}")

    def evaluate(self, step):
        self.evaluations[step] = {}
        self.calls.append(f"evaluate {step}")

    def save(self):
        self.calls.append(f"save {self.finished_steps}")

    def rounds(self):
        self._rounds(SimpleNamespace(requested=False) if self.stop_at is None else self)

    @property
    def requested(self):
        return self.finished_steps >= self.stop_at


def test_a_run_evaluates_before_it_saves():
    calls = []
    Recorded(calls).rounds()
    assert " ".join(calls) == (
        "sync evaluate 0 step 1 step 2 evaluate 2 save 2 step 3 step 4 evaluate 4 save 4 step 5 evaluate 5 save 5"
    )


def test_a_run_whose_time_is_over_evaluates_its_last_step():
    calls = []
    run = Recorded(calls, over_at=3)
    run.config = replace(run.config, max_seconds=60.0)
    run.rounds()
    assert calls[-4:] == ["step 3", "max_seconds 60: step 3 is the last that fits", "evaluate 3", "save 3"]


def test_an_evaluation_that_a_signal_put_off_is_made_on_resume_and_no_other_twice():
    calls = []
    with pytest.raises(RunInterrupted, match="after step 2"):
        Recorded(calls, stop_at=2).rounds()
    assert calls == ["sync", "evaluate 0", "step 1", "step 2", "save 2"]
    calls.clear()
    Recorded(calls, finished=2, evaluations=(0,)).rounds()
    assert calls[:4] == ["sync", "evaluate 2", "step 3", "step 4"]
    calls.clear()
    Recorded(calls, finished=2, evaluations=(0, 2)).rounds()
    assert calls[:3] == ["sync", "step 3", "step 4"]
    calls.clear()
    Recorded(calls, finished=5, evaluations=(0, 2, 4, 5)).rounds()
    assert calls == ["sync"]


def test_an_error_says_what_became_of_the_checkpoint_behind_it():
    calls = []
    with pytest.raises(ZeroDivisionError) as error:
        Recorded(calls, fail_at=3, unfinished=lambda: "run/step_000002").fit()
    assert error.value.__notes__ == ["checkpoint run/step_000002"]
    assert calls[-2:] == ["checkpoint run/step_000002", "closed"]

    def refused():
        raise CheckpointError("ranks [1] have not written")

    with pytest.raises(ZeroDivisionError) as error:
        Recorded(calls, fail_at=3, unfinished=refused).fit()
    assert error.value.__notes__ == ["a checkpoint that was being written is not complete: ranks [1] have not written"]
    with pytest.raises(ZeroDivisionError) as error:
        Recorded(calls, fail_at=1).fit()
    assert not hasattr(error.value, "__notes__")


def test_a_second_signal_waits_for_nothing():
    """What leaves by KeyboardInterrupt, where Python handles it, does not settle the save either."""
    calls = []

    def never():
        raise AssertionError("waited for a checkpoint")

    run = Recorded(calls, unfinished=never)

    def interrupted():
        raise KeyboardInterrupt

    run.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    assert calls[-1] == "closed"
