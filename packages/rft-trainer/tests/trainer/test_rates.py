"""Rates by hand, and phases that add up."""

import time
from types import SimpleNamespace

import pytest
import torch

from rft_trainer.trainer import PhaseClock
from rft_trainer.trainer.rates import Rates, peak_flops

METRICS = {"rollout/responses": 16.0, "rollout/tokens": 4000.0, "rollout/response_length": 100.0}


def test_rates_by_hand():
    rates = Rates(world_size=2, epochs=2, parameters=10**9, peak_flops=1e14)
    found = rates.of(METRICS, {"step": 8.0, "generate": 4.0, "update": 2.0})
    assert found == pytest.approx(
        {
            "perf/samples_per_second": 2.0,
            "perf/tokens_per_second": 500.0,
            "perf/tokens_per_second_per_rank": 250.0,
            "perf/generated_tokens_per_second": 400.0,
            "perf/update_mfu": 0.12,  # 6 x 1e9 x 4000 x 2 = 4.8e13 in 2 s, of 2e14 a second
        }
    )


@pytest.mark.parametrize("changes", [{"parameters": None}, {"peak_flops": None}])
def test_a_utilisation_that_is_not_defined_is_left_out(changes):
    rates = Rates(**{"world_size": 1, "epochs": 1, "parameters": 1, "peak_flops": 1.0, **changes})
    assert "perf/update_mfu" not in rates.of(METRICS, {"step": 1.0, "update": 1.0})
    assert peak_flops(torch.device("cpu")) is None


def test_phases_add_up_to_the_step():
    clock = PhaseClock(torch.device("cpu"))
    time.sleep(0.02)
    clock.restart()
    for name in ("generate", "update", "generate"):
        with clock(name):
            time.sleep(0.01)
    seconds = clock.seconds()
    step = seconds.pop("step")
    assert sum(seconds.values()) == pytest.approx(step, rel=0.02)
    assert seconds["generate"] >= 0.02
    assert seconds["other"] < step / 2


def test_what_is_noted_after_a_phase_is_recording_and_not_lost(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("rft_trainer.trainer.phases.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def passes(seconds):
        now[0] += seconds

    clock = PhaseClock(torch.device("cpu"), enter=lambda name: passes(0.25), leave=lambda name: passes(0.5))
    for name in ("generate", "update"):
        with clock(name):
            passes(2.0)
    with clock("record"):
        passes(1.0)
    passes(0.125)
    assert clock.seconds() == {"generate": 2.25, "update": 2.25, "record": 2.75, "other": 0.125, "step": 7.375}
    assert clock.border_seconds == 0.75
