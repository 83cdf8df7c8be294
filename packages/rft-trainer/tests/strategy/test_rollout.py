"""An engine whose weights are older than the actor refuses to generate."""

from dataclasses import replace

import pytest
import torch

from rft_dist import ParallelLayout, build_rollout_groups, distributed_session
from rft_engines import EngineConfig, EngineStateError, GenerationRequest, HFEngine, InvalidRequestError, SamplingParams
from rft_sync import WeightSyncError
from rft_trainer.config import OptimizerConfig
from rft_trainer.errors import StaleWeightsError
from rft_trainer.models import Actor, load_causal_model, padded_layout
from rft_trainer.optim import AdamWConfig
from rft_trainer.strategy import EngineRuntime, FSDPBackend
from rft_trainer.strategy.facade import in_dtype_of_actor
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


def test_an_actor_that_trains_in_the_engines_memory_ends_where_a_copied_one_does(folder):
    results = []
    for share in (False, True):
        with distributed_session():
            backend = FSDPBackend(torch.device("cpu"))
            state = backend.prepare(
                Actor(load_causal_model(folder)), OptimizerConfig(adamw=AdamWConfig(lr=0.1), max_norm=1.0)
            )
            groups = build_rollout_groups(ParallelLayout(1, 1, rank=0))
            runtime = EngineRuntime(HFEngine(folder), groups, share_weights=share)
            answers = []
            for _ in range(3):
                runtime.update_engine_weights(state)
                answers.append(runtime.generate(REQUESTS, GREEDY)[0].token_ids)
                layout = padded_layout([torch.tensor([5, 6, 7])], [torch.tensor(answers[-1])], 0)
                backend.backward(state, state.network(layout).log_probs.mean(), last=True)
                backend.optimizer_step(state)
                runtime.note_update()
            runtime.update_engine_weights(state)
            engine = dict(runtime.engine.native.named_parameters())
            addresses = {parameter.data_ptr() for parameter in engine.values()}
            trained = [parameter._local_tensor for parameter in state.network.parameters()]
            assert all(local.data_ptr() in addresses for local in trained) == share
            results.append((answers, {name: parameter.detach().clone() for name, parameter in engine.items()}))
            runtime.close()
            groups.close()
    (copied, first), (shared, second) = results
    assert copied == shared
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_sleep_and_wake_twice_are_once_and_a_sleeping_engine_says_so(parts):
    make, state = parts
    runtime = make(enable_sleep=True)
    runtime.update_engine_weights(state)
    assert runtime.sleep(update_follows=False)
    assert not runtime.sleep(update_follows=False)
    with pytest.raises(EngineStateError, match="asleep"):
        runtime.generate(REQUESTS, GREEDY)
    runtime.wake()
    runtime.wake()
    (kept,) = runtime.generate(REQUESTS, GREEDY)
    # A request that the engine cannot serve leaves it as it was.
    with pytest.raises(InvalidRequestError):
        runtime.generate([GenerationRequest((10**6,), seed=1)], GREEDY)
    assert runtime.generate(REQUESTS, GREEDY)[0].token_ids == kept.token_ids
    # Dropped weights are undefined until they are sent again, under the version that they had.
    runtime.sleep(update_follows=True)
    runtime.wake()
    with pytest.raises(EngineStateError, match="undefined"):
        runtime.generate(REQUESTS, GREEDY)
    runtime.sleep(update_follows=True)
    runtime.restore_weights(state)
    runtime.wake()
    (again,) = runtime.generate(REQUESTS, GREEDY)
    assert (again.token_ids, again.weights_version) == (kept.token_ids, 1)
    runtime.close()


def test_without_sleep_nothing_sleeps(parts):
    make, state = parts
    runtime = make(enable_sleep=False)
    runtime.update_engine_weights(state)
    assert not runtime.sleep(update_follows=True)
    assert runtime.generate(REQUESTS, GREEDY)[0].weights_version == 1
    runtime.close()


def test_an_engine_of_its_own_runs_in_the_dtype_of_the_actor_unless_it_names_one():
    vllm = EngineConfig(kind="vllm", model_path="folder")
    assert in_dtype_of_actor(vllm, bf16=True).dtype == "bfloat16"
    assert in_dtype_of_actor(vllm, bf16=False).dtype == "float32"
    assert in_dtype_of_actor(replace(vllm, dtype="float16"), bf16=True).dtype == "float16"
    assert in_dtype_of_actor(EngineConfig(), bf16=True).dtype == "auto"
