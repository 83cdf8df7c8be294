"""The conformance kit on the engines that need nothing but this package, and on engines that break a promise."""

import pytest
import torch

from rft_engines import FinishReason, GenerationRequest, HFEngine, SamplingParams
from rft_engines.testing import CHECKS, ConformanceError, EngineProbe, ScriptedEngine, check_engine

PROMPTS = [(5, 9, 11), (40, 3, 8, 21, 6, 7, 30), (12,)]


def bumpy_logits(request, sample_index, tokens):
    """Different for every prefix, never two equal."""
    base = sum(request.prompt_token_ids) + 7 * len(tokens) + 3 * sum(tokens)
    return [((base + 31 * token) % 97) / 40 for token in range(97)]


def hf_probe(model):
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def reference(prompt, tokens, temperature):
        with torch.no_grad():
            log_probs = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0] / temperature, dim=-1)
        return [log_probs[len(prompt) - 1 + place, token].item() for place, token in enumerate(tokens)]

    def load_weights(engine):
        engine.native.load_state_dict(start)

    return EngineProbe(prompts=PROMPTS, vocab_size=97, load_weights=load_weights, reference=reference, tolerance=1e-5)


def test_hf_engine_conforms(model):
    outcomes = check_engine(HFEngine(model), hf_probe(model))
    assert len(outcomes) == len(CHECKS) == 40
    assert len({check.name for check in CHECKS}) == 40


def test_scripted_engine_conforms():
    def reference(prompt, tokens, temperature):
        values = []
        for place, token in enumerate(tokens):
            scores = torch.tensor(bumpy_logits(GenerationRequest(prompt), 0, tokens[:place])) / temperature
            values.append(torch.log_softmax(scores, dim=0)[token].item())
        return values

    engine = ScriptedEngine(bumpy_logits, vocab_size=97, max_model_len=512, seconds_per_step=0.0005)
    check_engine(engine, EngineProbe(prompts=PROMPTS, vocab_size=97, reference=reference, tolerance=1e-5))


class Forgetful(ScriptedEngine):
    """Returns the samples in the wrong order, keeps no version and answers while asleep."""

    def generate(self, requests, sampling, *, max_steps=None):
        self._awake = {"weights", "kv_cache"}
        return super().generate(requests, sampling, max_steps=max_steps)[::-1]

    def finish_weight_update(self, version):
        super().finish_weight_update(0)


def test_broken_promises_are_named():
    with pytest.raises(ConformanceError) as failure:
        check_engine(Forgetful(bumpy_logits, vocab_size=97), EngineProbe(prompts=PROMPTS, vocab_size=97))
    for name in (
        "samples come prompt by prompt",
        "prompts come back as sent",
        "a sleeping engine refuses generate",
        "a finished update sets the version",
    ):
        assert f"- {name}: " in str(failure.value)
    assert "- equal seeds give equal tokens" not in str(failure.value)


def test_unknown_skip_is_an_error():
    with pytest.raises(ValueError, match="no checks"):
        check_engine(
            ScriptedEngine(bumpy_logits, vocab_size=97), EngineProbe(prompts=PROMPTS, vocab_size=97), skip=["typo"]
        )


def test_scripted_answers_come_back_word_for_word():
    engine = ScriptedEngine.answering({(5, 6): (7, 8), (9,): ()}, vocab_size=20, eos_token_id=2)
    samples = engine.generate([GenerationRequest((5, 6)), GenerationRequest((9,))], SamplingParams(n=2))
    assert [sample.token_ids for sample in samples] == [(7, 8, 2), (7, 8, 2), (2,), (2,)]
    assert {sample.finish_reason for sample in samples} == {FinishReason.STOP}
    assert engine.calls[0][1].n == 2
