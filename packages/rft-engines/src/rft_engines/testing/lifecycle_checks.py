"""Checks of sleep, wake-up, weight updates and the end."""

import random
import threading
import time

import torch

from rft_engines.contract import CUDA_GRAPHS, KV_CACHE, WEIGHTS, Fate
from rft_engines.errors import EngineStateError
from rft_engines.generation import FinishReason, Generation
from rft_engines.protocol import EngineState, RolloutEngine
from rft_engines.sampling import SamplingParams
from rft_engines.testing.probe import GREEDY, Check, EngineProbe, require, require_equal, require_refused


def _greedy(engine: RolloutEngine, probe: EngineProbe) -> list[tuple[int, ...]]:
    return [sample.token_ids for sample in engine.generate(probe.requests(), GREEDY)]


def the_contract_covers_both_levels(engine: RolloutEngine, probe: EngineProbe) -> None:
    contract = engine.contract
    for level in contract.effects:
        effect = contract.effect(level)
        fates = {name: getattr(effect, name) for name in (WEIGHTS, KV_CACHE, CUDA_GRAPHS)}
        require(all(isinstance(fate, Fate) for fate in fates.values()), f"level {level} has fates {fates}")
    require(contract.effect(1).weights is not Fate.UNDEFINED, "level 1 must keep the weights' content")
    require_equal(contract.effect(2).weights, Fate.UNDEFINED, "fate of weights at level 2")
    require_refused(lambda: engine.sleep(7), "level 7", ValueError)


def sleep_and_wake_up_are_idempotent(engine: RolloutEngine, probe: EngineProbe) -> None:
    for call, state in ((engine.sleep, EngineState.ASLEEP), (engine.wake_up, EngineState.READY)):
        for _ in range(2):
            call()
            require_equal(engine.state, state, f"state after {call.__name__}")


def a_sleeping_engine_refuses_generate(engine: RolloutEngine, probe: EngineProbe) -> None:
    engine.sleep(1)
    require_refused(lambda: engine.generate(probe.requests(), GREEDY), "wake_up()", EngineStateError)


def kept_weights_answer_as_before(engine: RolloutEngine, probe: EngineProbe) -> None:
    before = _greedy(engine, probe)
    engine.sleep(1)
    engine.wake_up()
    require_equal(_greedy(engine, probe), before, "greedy tokens after sleep(1) and wake_up")


def waking_is_staged(engine: RolloutEngine, probe: EngineProbe) -> None:
    engine.sleep(1)
    require_refused(lambda: engine.wake_up([KV_CACHE]), "weights", EngineStateError)
    engine.wake_up([WEIGHTS])
    require_equal(engine.state, EngineState.WEIGHTS_AWAKE, "state after waking the weights")
    require_refused(lambda: engine.generate(probe.requests(), GREEDY), "kv_cache", EngineStateError)
    engine.wake_up([KV_CACHE])
    require_equal(engine.state, EngineState.READY, "state after waking the KV cache")


def unknown_tags_are_refused(engine: RolloutEngine, probe: EngineProbe) -> None:
    require_refused(lambda: engine.wake_up(["cache"]), "cache", ValueError)
    require_refused(lambda: engine.wake_up(WEIGHTS), "list", ValueError)


def deeper_sleep_needs_a_wake_up(engine: RolloutEngine, probe: EngineProbe) -> None:
    engine.sleep(1)
    require_refused(lambda: engine.sleep(2), "wake_up()", EngineStateError)


def dropped_weights_must_be_loaded_before_generate(engine: RolloutEngine, probe: EngineProbe) -> None:
    before = _greedy(engine, probe)
    engine.sleep(2)
    engine.wake_up()
    require_equal(engine.state, EngineState.WEIGHTS_UNDEFINED, "state after waking without weights")
    require_refused(lambda: engine.generate(probe.requests(), GREEDY), "weight update", EngineStateError)
    probe.update(engine, engine.weights_version)
    require_equal(engine.state, EngineState.READY, "state after the update")
    if probe.load_weights is not None:
        require_equal(_greedy(engine, probe), before, "greedy tokens after the update")


def sleeping_again_does_not_define_weights(engine: RolloutEngine, probe: EngineProbe) -> None:
    engine.sleep(2)
    engine.wake_up()
    engine.sleep(1)
    engine.wake_up()
    require_equal(engine.state, EngineState.WEIGHTS_UNDEFINED, "state after sleep(2), sleep(1)")


def an_update_wakes_sleeping_weights_only(engine: RolloutEngine, probe: EngineProbe) -> None:
    engine.sleep(2)
    engine.begin_weight_update()
    require_equal(engine.state, EngineState.UPDATING, "state while an update is open")
    if probe.load_weights is not None:
        probe.load_weights(engine)
    engine.finish_weight_update(engine.weights_version)
    require_equal(engine.state, EngineState.WEIGHTS_AWAKE, "state after an update in sleep")


def an_open_update_refuses_generate_and_sleep(engine: RolloutEngine, probe: EngineProbe) -> None:
    engine.begin_weight_update()
    for call in (lambda: engine.generate(probe.requests(), GREEDY), engine.sleep, engine.begin_weight_update):
        require_refused(call, "update is open", EngineStateError)


def a_finished_update_sets_the_version(engine: RolloutEngine, probe: EngineProbe) -> None:
    version = engine.weights_version + 3
    probe.update(engine, version)
    require_equal(engine.weights_version, version, "version")
    found = {sample.weights_version for sample in engine.generate(probe.requests(), GREEDY)}
    require_equal(found, {version}, "version of the samples")


def a_failed_update_leaves_weights_undefined(engine: RolloutEngine, probe: EngineProbe) -> None:
    version = engine.weights_version
    engine.begin_weight_update()
    engine.abort_weight_update("broken cable")
    require_equal(engine.state, EngineState.WEIGHTS_UNDEFINED, "state after a failed update")
    require_equal(engine.weights_version, version, "version after a failed update")
    require_refused(lambda: engine.generate(probe.requests(), GREEDY), "broken cable", EngineStateError)


def an_update_must_be_begun(engine: RolloutEngine, probe: EngineProbe) -> None:
    require_refused(lambda: engine.finish_weight_update(1), "begin_weight_update", EngineStateError)
    require_refused(lambda: engine.abort_weight_update("nothing"), "begin_weight_update", EngineStateError)
    engine.begin_weight_update()
    require_refused(lambda: engine.finish_weight_update(-1), "version", ValueError)
    require_equal(engine.state, EngineState.UPDATING, "state after a refused version")


def prefixes_can_be_forgotten_at_any_time(engine: RolloutEngine, probe: EngineProbe) -> None:
    before = _greedy(engine, probe)
    require(engine.reset_prefix_cache(), "the prefix cache of an idle engine was not emptied")
    require_equal(_greedy(engine, probe), before, "greedy tokens after emptying the prefix cache")
    engine.sleep(1)
    require(engine.reset_prefix_cache(), "resetting a released prefix cache is a no-op that succeeds")


def random_state_of_the_process_is_untouched(engine: RolloutEngine, probe: EngineProbe) -> None:
    torch_before, python_before = torch.get_rng_state(), random.getstate()
    engine.generate(probe.requests(seed=None), SamplingParams(max_new_tokens=3))
    require(bool(torch.equal(torch.get_rng_state(), torch_before)), "generate changed torch's random state")
    require(random.getstate() == python_before, "generate changed Python's random state")


def sleep_aborts_what_runs(engine: RolloutEngine, probe: EngineProbe) -> None:
    if not probe.interruptible:
        return
    limit = engine.max_model_len or 4096
    budget = limit - max(len(prompt) for prompt in probe.prompts)
    endless = SamplingParams(max_new_tokens=budget, ignore_eos=True)
    samples: list[Generation] = []
    runner = threading.Thread(target=lambda: samples.extend(engine.generate(probe.requests(), endless)))
    runner.start()
    deadline = time.monotonic() + 60
    aborted = 0
    while not aborted and runner.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
        aborted = engine.sleep(1)
        if not aborted:
            engine.wake_up()
    runner.join(60)
    require_equal(aborted, len(probe.prompts), "requests that sleep reports as aborted")
    reasons = {sample.finish_reason for sample in samples}
    require(FinishReason.ABORT in reasons, f"finish reasons {reasons} of an interrupted call")
    engine.wake_up()
    for sample in engine.generate(probe.requests()[:1], GREEDY):
        require_equal(len(sample.token_ids), GREEDY.max_new_tokens, "tokens of the next call")


def nothing_to_abort_is_no_error(engine: RolloutEngine, probe: EngineProbe) -> None:
    require_equal(engine.abort(), 0, "requests aborted on an idle engine")
    for sample in engine.generate(probe.requests(), GREEDY):
        require_equal(sample.finish_reason, FinishReason.LENGTH, "finish reason after abort on an idle engine")


def a_closed_engine_refuses_everything(engine: RolloutEngine, probe: EngineProbe) -> None:
    for _ in range(2):
        engine.close()
        require_equal(engine.state, EngineState.CLOSED, "state after close")
    for call in (lambda: engine.generate(probe.requests(), GREEDY), engine.sleep, engine.wake_up):
        require_refused(call, "closed", EngineStateError)


LIFECYCLE_CHECKS = tuple(
    Check(run.__name__.replace("_", " "), run)
    for run in (
        the_contract_covers_both_levels,
        sleep_and_wake_up_are_idempotent,
        a_sleeping_engine_refuses_generate,
        kept_weights_answer_as_before,
        waking_is_staged,
        unknown_tags_are_refused,
        deeper_sleep_needs_a_wake_up,
        dropped_weights_must_be_loaded_before_generate,
        sleeping_again_does_not_define_weights,
        an_update_wakes_sleeping_weights_only,
        an_open_update_refuses_generate_and_sleep,
        a_finished_update_sets_the_version,
        a_failed_update_leaves_weights_undefined,
        an_update_must_be_begun,
        prefixes_can_be_forgotten_at_any_time,
        random_state_of_the_process_is_untouched,
        sleep_aborts_what_runs,
        nothing_to_abort_is_no_error,
    )
)
CLOSING_CHECK = Check(a_closed_engine_refuses_everything.__name__.replace("_", " "), a_closed_engine_refuses_everything)
