"""What the vLLM adapter reads from a step, on outputs written by hand; vLLM itself is not needed."""

from types import SimpleNamespace

import numpy as np
import pytest

from rft_engines import MissingLogProbError
from rft_engines.vllm.stepping import CoreStepper, TextStepper


class Engine:
    """Hands out scripted outputs and notes what is asked of it."""

    def __init__(self, outputs):
        self.outputs = outputs
        self.engine_core = SimpleNamespace(get_output=lambda: SimpleNamespace(outputs=self.outputs))
        self.dropped = []
        self.adapters = []

    def add_request(self, name, prompt, sampling, lora_request=None):
        self.adapters.append(lora_request)
        return f"{name}-inside"

    def step(self):
        return self.outputs

    def abort_request(self, keys, internal=False):
        self.dropped.append((keys, internal))


def log_probs(ids, values):
    return SimpleNamespace(logprob_token_ids=np.array(ids), logprobs=np.array(values, dtype=np.float32))


def core_output(tokens, found, reason=None):
    return SimpleNamespace(
        request_id="a-inside", new_token_ids=tokens, new_logprobs=found, finish_reason=reason, stop_reason=None
    )


def test_the_core_steps_give_ids_and_the_sampled_tokens_log_probs():
    found = log_probs([[42, 7], [5, 5]], [[-3.2, -0.1], [-0.5, -0.5]])
    stepper = CoreStepper(Engine([core_output([42, 5], found), core_output([], None, "length")]))
    assert stepper.submit("a", {}, None) == "a-inside"
    first, second = stepper.step()
    assert (first.key, first.token_ids, first.finish_reason) == ("a-inside", [42, 5], None)
    assert first.log_probs == pytest.approx([-3.2, -0.5])
    assert (list(second.token_ids), list(second.log_probs), second.finish_reason) == ([], [], "length")


@pytest.mark.parametrize("found", [None, log_probs([[7, 42]], [[-0.1, -3.2]])])
def test_a_missing_log_prob_of_the_sampled_token_is_an_error(found):
    with pytest.raises(MissingLogProbError, match=r"sampled tokens \[42\]"):
        list(CoreStepper(Engine([core_output([42], found)])).step())


def test_the_core_is_asked_to_drop_by_its_own_ids():
    engine = Engine([])
    CoreStepper(engine).drop(["a-inside"])
    TextStepper(engine).drop(["a"])
    assert engine.dropped == [(["a-inside"], True), (["a"], False)]


def test_text_steps_take_the_sampled_token_out_of_the_candidates():
    completion = SimpleNamespace(
        token_ids=(42,), logprobs=[{9: -1.0}, {7: -0.1, 42: -3.2}], finish_reason="stop", stop_reason="x"
    )
    output = SimpleNamespace(request_id="a", outputs=[completion], finished=True, prompt_token_ids=[1, 1])
    ((key, tokens, values, reason, stop, prompt),) = TextStepper(Engine([output])).step()
    assert (key, tokens, values, reason, stop, prompt) == ("a", [42], [-3.2], "stop", "x", [1, 1])


@pytest.mark.parametrize("kind", [CoreStepper, TextStepper])
def test_the_adapter_of_the_last_update_goes_with_every_sample(kind):
    engine = Engine([])
    kind(engine).submit("a", {}, None)
    kind(engine).submit("b", {}, None, "policy")
    assert engine.adapters == [None, "policy"]
