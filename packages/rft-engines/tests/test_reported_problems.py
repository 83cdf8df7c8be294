"""Problems that users of such engines have met, one test each."""

import logging
from pathlib import Path

import pytest
import torch

from rft_engines import (
    EngineState,
    EngineStateError,
    FinishReason,
    GenerationRequest,
    HFEngine,
    InvalidRequestError,
    MissingLogProbError,
    PromptTooLongError,
    SamplingParams,
    SleepLevel,
    UnsupportedCombinationError,
    sleep_contract,
    split_by_length,
)
from rft_engines.answers import sampled_log_prob
from rft_engines.combinations import COMBINATIONS, Evidence, check_combination, combinations_table
from rft_engines.drift import log_prob_gap, padded_log_probs
from rft_engines.memory import SleepMemory
from rft_engines.sglang.arguments import refuse_unsupported
from rft_engines.testing import ScriptedEngine
from rft_engines.vllm.arguments import LOWEST_TEMPERATURE

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
END = 9


def write(engine, weights, version):
    engine.begin_weight_update()
    engine.native.load_state_dict(weights)
    engine.finish_weight_update(version)


def test_nothing_of_the_old_weights_survives_an_update(model, build_model, prompts):
    request = [GenerationRequest(prompts[3] * 5)]
    other = build_model(seed=1)
    engine = HFEngine(model)
    old = engine.generate(request, GREEDY)[0]
    write(engine, other.state_dict(), 1)
    new, fresh = engine.generate(request, GREEDY)[0], HFEngine(other).generate(request, GREEDY)[0]
    assert new.token_ids == fresh.token_ids != old.token_ids
    assert new.log_probs[0] == pytest.approx(fresh.log_probs[0], abs=1e-5)
    assert (old.weights_version, new.weights_version) == (0, 1)


def test_dropped_weights_never_make_text(model, build_model, prompts):
    weights = build_model().state_dict()
    engine = HFEngine(model)
    before = engine.generate([GenerationRequest(prompts[0])], GREEDY)
    engine.sleep(2)
    assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) == 0
    engine.wake_up()
    with pytest.raises(EngineStateError, match=r"sleep\(2\) dropped them"):
        engine.generate([GenerationRequest(prompts[0])], GREEDY)
    write(engine, weights, 0)
    assert engine.generate([GenerationRequest(prompts[0])], GREEDY) == before


def test_tied_weights_are_still_tied_after_deep_sleep(build_model):
    model = build_model(tie_word_embeddings=True)
    weights = build_model(tie_word_embeddings=True).state_dict()
    engine = HFEngine(model)
    engine.sleep(2)
    engine.wake_up()
    write(engine, weights, 1)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, weights["model.embed_tokens.weight"])


def test_a_loaded_checkpoint_can_be_dropped_too(model, tmp_path, prompts):
    # Its parameters lie in a mapped file, whose memory cannot be resized.
    model.save_pretrained(tmp_path)
    engine = HFEngine(tmp_path)
    before = engine.generate([GenerationRequest(prompts[0])], GREEDY)[0].token_ids
    engine.sleep(2)
    assert engine.sleep_memory.rounds == [{"weights": 0}]
    write(engine, model.state_dict(), 1)
    engine.wake_up()
    assert engine.generate([GenerationRequest(prompts[0])], GREEDY)[0].token_ids == before


def test_the_cache_is_not_back_before_the_update_is_finished():
    engine = ScriptedEngine.answering({(1,): (3,)}, vocab_size=10, eos_token_id=END, contract=sleep_contract("vllm"))
    engine.sleep(2)
    engine.begin_weight_update()
    engine.finish_weight_update(1)
    assert engine.events == ["release 2", "restore weights"]
    engine.wake_up()
    assert engine.events == ["release 2", "restore weights", "restore kv_cache"]


@pytest.mark.parametrize("level", [1, 2])
def test_a_second_sleep_and_a_second_wake_up_touch_nothing(level):
    engine = ScriptedEngine.answering({(1,): (3,)}, vocab_size=10, eos_token_id=END, contract=sleep_contract("vllm"))
    engine.sleep(level)
    for again in range(1, level + 1):
        assert engine.sleep(again) == 0
    assert engine.events == [f"release {level}"]
    assert len(engine.sleep_memory.rounds) <= 1
    for _ in range(2):
        engine.wake_up()
    assert engine.events == [f"release {level}", "restore weights", "restore kv_cache"]
    if level == 2:
        with pytest.raises(EngineStateError, match=r"sleep\(2\) dropped them"):
            engine.generate([GenerationRequest((1,))], GREEDY)
    else:
        assert engine.generate([GenerationRequest((1,))], GREEDY)[0].token_ids[0] == 3


@pytest.mark.parametrize("name", ["hf", "vllm", "sglang"])
def test_one_script_of_sleep_means_the_same_on_every_engine(name):
    contract = sleep_contract(name)
    engine = ScriptedEngine.answering({(1,): (3,)}, vocab_size=10, eos_token_id=END, contract=contract)
    before = engine.generate([GenerationRequest((1,))], GREEDY)
    engine.sleep(contract.level_for(full_update_follows=False))
    assert engine.reset_prefix_cache(), "a no-op while the cache is released"
    engine.wake_up(["weights"])
    assert engine.reset_prefix_cache()
    assert "drop caches" not in engine.events
    engine.wake_up(["kv_cache"])
    assert engine.generate([GenerationRequest((1,))], GREEDY) == before


def test_memory_that_grows_over_sleeps_is_reported_with_its_owner(caplog):
    memory = SleepMemory(limit_bytes=64 << 20)
    with caplog.at_level(logging.INFO):
        growth = [memory.record({"weights": 0, "other": (round_ + 3) << 30}) for round_ in range(3)]
    assert growth == [0, 0, 1 << 30]
    assert len([record for record in caplog.records if record.levelno == logging.INFO]) == 3
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "grew by 1024 MiB" in warning
    assert "most of it other" in warning


def test_twenty_rounds_of_sleep_hold_no_memory(model, build_model, prompts):
    weights = build_model().state_dict()
    engine = HFEngine(model)
    for version in range(20):
        engine.generate([GenerationRequest(prompts[0])], GREEDY)
        engine.sleep(SleepLevel.DROP_WEIGHTS)
        write(engine, weights, version)
        engine.wake_up()
    assert engine.sleep_memory.rounds == [{"weights": 0}] * 20


def test_sampling_is_not_filled_in_from_the_checkpoint(model, prompts, caplog):
    request = [GenerationRequest(prompts[3], seed=5)]
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True)
    plain = HFEngine(model).generate(request, sampling)
    model.generation_config.update(repetition_penalty=1.1, top_p=0.8, top_k=20, temperature=0.5, do_sample=True)
    engine = HFEngine(model)
    with caplog.at_level(logging.INFO, logger="rft_engines"):
        assert engine.generate(request, sampling) == plain
        engine.generate(request, sampling)
    effective = [record.getMessage() for record in caplog.records if "temperature" in record.getMessage()]
    assert effective == ["engine hf samples with temperature=1.0 top_p=1.0 top_k=0, no penalties"]


def test_the_sampled_tokens_log_prob_is_taken_not_the_likeliest():
    assert sampled_log_prob({7: -0.1, 42: -3.2}, 42) == -3.2
    with pytest.raises(MissingLogProbError, match="token 5"):
        sampled_log_prob({7: -0.1, 42: -3.2}, 5)


def test_prompts_near_the_context_limit(model):
    engine = HFEngine(model, max_model_len=512)
    sampling = SamplingParams(temperature=0, max_new_tokens=100, ignore_eos=True)
    requests = [GenerationRequest((5,) * length) for length in (500, 513)]
    with pytest.raises(PromptTooLongError, match="513 prompt tokens"):
        engine.generate(requests, sampling)
    fitting, too_long = split_by_length(requests, 512)
    (sample,) = engine.generate(fitting, sampling)
    assert len(sample.token_ids) == 12
    assert len(too_long) == 1


def test_short_prompts_are_padded_on_the_left(model, prompts):
    seen = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((kwargs["attention_mask"], kwargs["position_ids"])), with_kwargs=True
    )
    requests = [GenerationRequest(prompts[0]), GenerationRequest(prompts[1])]
    together = HFEngine(model).generate(requests, GREEDY)
    handle.remove()
    alone = [HFEngine(model).generate([request], GREEDY)[0] for request in requests]
    assert [sample.token_ids for sample in together] == [sample.token_ids for sample in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    mask, positions = seen[0]
    assert mask.int().tolist() == [[1] * 7, [0] * 4 + [1] * 3]
    assert positions.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1, 2]]


def test_every_end_id_of_the_config_ends(build_model, prompts):
    model = build_model(eos_token_id=[11, 12])
    engine = HFEngine(model)
    assert engine.eos_token_ids == (11, 12)
    with torch.no_grad():
        model.lm_head.weight[[11, 12]] = model.lm_head.weight[[11, 12]] * 3
    samples = engine.generate([GenerationRequest(prompt) for prompt in prompts], SamplingParams(n=4, max_new_tokens=60))
    last = {sample.token_ids[-1] for sample in samples if not sample.truncated}
    assert last == {11, 12}
    assert all(token not in (11, 12) for sample in samples for token in sample.token_ids[:-1])


def test_ends_and_cuts_by_hand():
    answers = {(1, 2): (3, 4), (5,): (2, 3, 4, 5, 6), (6,): (), (7,): (3, END, 5)}
    engine = ScriptedEngine.answering(answers, vocab_size=10, eos_token_id=END)
    samples = engine.generate([GenerationRequest(prompt) for prompt in answers], SamplingParams(max_new_tokens=4))
    assert [(sample.token_ids, sample.truncated) for sample in samples] == [
        ((3, 4, END), False),
        ((2, 3, 4, 5), True),
        ((END,), False),
        ((3, END), False),
    ]


def test_empty_responses_keep_their_place():
    answers = {(1,): (3,) * 5, (2,): (4,) * 5}
    engine = ScriptedEngine.answering(answers, vocab_size=10, eos_token_id=END)
    short = [GenerationRequest((1,)), GenerationRequest((2,))]
    whole = [sample.log_probs for sample in engine.generate(short, GREEDY)]
    values, mask = padded_log_probs([(), whole[0][:5], (), whole[1][:3]])
    assert values.shape == mask.shape == (4, 5)
    assert int(mask.sum()) == 8
    assert log_prob_gap(values, values, mask).mean == 0
    nothing, empty = padded_log_probs([(), ()])
    assert log_prob_gap(nothing, nothing, empty).tokens == 0


def test_a_gap_between_engine_and_trainer_is_measured(caplog):
    trainer = torch.full((10, 10), -1.0)
    engine = trainer.clone()
    engine[0, :5] += 0.3
    gap = log_prob_gap(engine, trainer, torch.ones(10, 10))
    assert (gap.tokens, gap.outside) == (100, 0.05)
    assert gap.mean == pytest.approx(0.015)
    assert gap.largest == pytest.approx(0.3)
    assert not gap.exceeds(mean_limit=0.02)
    assert gap.exceeds(mean_limit=0.01)
    assert "0.0150" in caplog.text


def test_an_abort_that_comes_late_is_not_for_the_next_call():
    engine = ScriptedEngine.answering({(1,): (3, 4)}, vocab_size=10, eos_token_id=END)
    take, late = engine._generate, []

    def finished_and_then_aborted(requests, sampling, max_steps):
        samples = take(requests, sampling, max_steps)
        late.append(engine.abort())
        return samples

    engine._generate = finished_and_then_aborted
    (sample,) = engine.generate([GenerationRequest((1,))], GREEDY)
    del engine._generate
    assert (late, sample.finish_reason) == ([1], FinishReason.LENGTH)
    (sample,) = engine.generate([GenerationRequest((1,))], GREEDY)
    assert (sample.finish_reason, len(sample.token_ids)) == (FinishReason.LENGTH, 8)


def test_a_failed_generate_leaves_a_known_state(prompts):
    def logits(request, sample_index, tokens):
        if len(tokens) == 2:
            raise FloatingPointError("script ends here")
        return [0.0] * 10

    engine = ScriptedEngine(logits, vocab_size=10)
    with pytest.raises(FloatingPointError):
        engine.generate([GenerationRequest((1,))], GREEDY)
    assert engine.state is EngineState.READY
    (sample,) = engine.generate([GenerationRequest((1,))], SamplingParams(max_new_tokens=2))
    assert sample.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("undefined", [False, True])
def test_a_cancelled_update_leaves_the_weights_as_they_were(undefined):
    engine = ScriptedEngine(lambda request, index, tokens: [0.0] * 10, vocab_size=10)
    with pytest.raises(EngineStateError, match="no update is open"):
        engine.cancel_weight_update()
    if undefined:
        engine.sleep(2)
    engine.begin_weight_update()
    with pytest.raises(EngineStateError, match="update is open"):
        engine.generate([GenerationRequest((1,))], GREEDY)
    engine.cancel_weight_update()
    engine.wake_up()
    assert engine.state is (EngineState.WEIGHTS_UNDEFINED if undefined else EngineState.READY)
    assert engine.weights_version == 0


def test_a_temperature_that_an_engine_would_change_in_silence_is_refused():
    for temperature, engine, lowest in ((0.001, "vllm", LOWEST_TEMPERATURE), (1e-7, "sglang", 1e-6)):
        with pytest.raises(
            UnsupportedCombinationError, match=f"'{engine}' and temperature={temperature}: below {lowest}"
        ):
            SamplingParams(temperature=temperature).refuse_temperature_below(lowest, engine)
        for right in (0, lowest, 1.0):
            SamplingParams(temperature=right).refuse_temperature_below(lowest, engine)
    with pytest.raises(UnsupportedCombinationError, match="temperature=1e-07"):
        refuse_unsupported(SamplingParams(temperature=1e-7), None, tokenizer=True)


def test_ids_in_place_of_a_request_are_refused():
    engine = ScriptedEngine(lambda request, index, tokens: [0.0] * 10, vocab_size=10)
    with pytest.raises(InvalidRequestError, match="request 1 is a list: give a GenerationRequest"):
        engine.generate([GenerationRequest((1,)), [1, 2]], GREEDY)


@pytest.mark.parametrize("budget", [0, 1.5, True, "3"])
def test_a_step_budget_is_a_whole_number(budget):
    engine = ScriptedEngine(lambda request, index, tokens: [0.0] * 10, vocab_size=10)
    with pytest.raises(ValueError, match="max_steps="):
        engine.generate([GenerationRequest((1,))], GREEDY, max_steps=budget)


def test_the_table_of_combinations_is_what_the_start_up_check_reads():
    for row in COMBINATIONS:
        given = {"backend": row.backend, "weights": row.weights, "engine": row.engine, "modality": row.modality}
        if row.supported:
            check_combination(**given)
        else:
            with pytest.raises(UnsupportedCombinationError, match=row.engine):
                check_combination(**given)
    assert any(not row.supported for row in COMBINATIONS)
    assert {row.tested for row in COMBINATIONS if not row.supported} == {Evidence.NOTHING}
    with pytest.raises(ValueError, match="backend='ddp'"):
        check_combination(backend="ddp", weights="full", engine="hf", modality="text")


def test_the_start_up_check_warns_of_what_was_not_run_with_the_engine_itself(caplog):
    check_combination(backend="fsdp", weights="full", engine="sglang", modality="vision")
    assert caplog.text == ""
    check_combination(backend="fsdp", weights="lora_adapter", engine="vllm", modality="vision")
    assert "'vllm' with weights 'lora_adapter' (fsdp, vision) was tested with nothing" in caplog.text


def test_the_page_of_combinations_is_the_table():
    page = Path(__file__).parents[3] / "docs" / "engines" / "combinations.md"
    if not page.is_file():
        pytest.skip("the repository's documentation is not beside the package")
    assert page.read_text().endswith(combinations_table())
