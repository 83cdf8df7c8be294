"""An engine whose weights are older than the actor refuses to generate."""

import pytest
import torch

from rft_dist import ParallelLayout, build_rollout_groups, distributed_session
from rft_engines import GenerationRequest, HFEngine, SamplingParams
from rft_sync import WeightSyncError
from rft_trainer.config import OptimizerConfig
from rft_trainer.errors import StaleWeightsError
from rft_trainer.models import Actor, load_causal_model
from rft_trainer.optim import AdamWConfig
from rft_trainer.strategy import EngineRuntime, FSDPBackend
from rft_trainer.testing import tiny_model_folder

REQUESTS = [GenerationRequest((5, 6, 7), seed=1)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def parts(folder):
    """(runtime maker, actor state) inside a process group of one."""
    with distributed_session():
        state = FSDPBackend(torch.device("cpu")).prepare(
            Actor(load_causal_model(folder)), OptimizerConfig(adamw=AdamWConfig(lr=0.1))
        )
        groups = build_rollout_groups(ParallelLayout(1, 1, rank=0))
        yield lambda **options: EngineRuntime(HFEngine(folder), groups, **options), state
        groups.close()


def shift_weights(state, amount):
    with torch.no_grad():
        for parameter in state.network.parameters():
            parameter.add_(amount)


def test_each_generation_has_the_version_that_made_it(parts):
    make, state = parts
    runtime = make()
    with pytest.raises(StaleWeightsError, match="never sent"):
        runtime.generate(REQUESTS, GREEDY)
    assert runtime.update_engine_weights(state).version == 1
    (first,) = runtime.generate(REQUESTS, GREEDY)
    shift_weights(state, 0.5)
    runtime.note_update()
    assert runtime.weight_lag == 1
    with pytest.raises(StaleWeightsError, match=r"version 1\) is 1 optimiser steps older"):
        runtime.generate(REQUESTS, GREEDY)
    runtime.update_engine_weights(state)
    (second,) = runtime.generate(REQUESTS, GREEDY)
    assert (first.weights_version, second.weights_version) == (1, 2)
    runtime.close()


def test_a_configured_lag_is_allowed_and_no_more(parts):
    make, state = parts
    runtime = make(max_lag=1)
    runtime.update_engine_weights(state)
    runtime.note_update()
    assert runtime.generate(REQUESTS, GREEDY)[0].weights_version == 1
    runtime.note_update()
    with pytest.raises(StaleWeightsError, match="allowed lag 1"):
        runtime.generate(REQUESTS, GREEDY)
    runtime.close()


@pytest.mark.parametrize("sleep", [False, True])
def test_updates_do_not_depend_on_sleep(parts, sleep):
    make, state = parts
    runtime = make(enable_sleep=sleep)
    for version in (1, 2):
        shift_weights(state, 0.01)
        runtime.note_update()
        assert runtime.update_engine_weights(state).version == version
        with runtime.awake():
            assert runtime.generate(REQUESTS, GREEDY)[0].weights_version == version
    runtime.close()


def test_a_failed_update_leaves_an_engine_that_refuses(parts):
    make, state = parts
    runtime = make()
    runtime.update_engine_weights(state)
    shift_weights(state, float("nan"))
    runtime.note_update()
    with pytest.raises(WeightSyncError, match="NaN"):
        runtime.update_engine_weights(state)
    with pytest.raises(StaleWeightsError):
        runtime.generate(REQUESTS, GREEDY)
    runtime.close()
