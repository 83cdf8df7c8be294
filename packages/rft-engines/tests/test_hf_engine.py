"""HFEngine against transformers' own generation and a teacher-forced forward."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM

from rft_engines import FinishReason, GenerationRequest, HFEngine, SamplingParams, UnsupportedCombinationError

GREEDY = SamplingParams(temperature=0, max_new_tokens=20)


def reference_greedy(model, prompt, max_new_tokens):
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
    )
    return tuple(output[0, len(prompt) :].tolist())


def teacher_forced(model, sample, temperature=1.0):
    """Log-probabilities [T] of the sample's tokens in one forward."""
    ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
    with torch.no_grad():
        log_probs = torch.log_softmax(model(ids).logits[0].double() / temperature, dim=-1)
    places = torch.arange(len(sample.prompt_token_ids) - 1, ids.shape[1] - 1)
    return log_probs[places, torch.tensor(sample.token_ids, dtype=torch.long)]


def requests_for(prompts, seed=100):
    return [GenerationRequest(prompt, seed=seed + place) for place, prompt in enumerate(prompts)]


@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_greedy_equals_model_generate_token_for_token(model, prompts, max_rows):
    engine = HFEngine(model, max_rows=max_rows)
    samples = engine.generate([GenerationRequest(prompt) for prompt in prompts], GREEDY)
    assert [sample.token_ids for sample in samples] == [reference_greedy(model, prompt, 20) for prompt in prompts]
    assert len({len(sample.token_ids) for sample in samples}) > 1, "the case should have rows that leave early"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_a_teacher_forced_forward(model, prompts, temperature):
    samples = HFEngine(model).generate(requests_for(prompts), SamplingParams(n=2, temperature=temperature))
    for sample in samples:
        expected = teacher_forced(model, sample, temperature)
        torch.testing.assert_close(torch.tensor(sample.log_probs).double(), expected, atol=1e-5, rtol=0)


def test_greedy_log_probs_are_those_of_the_untempered_distribution(model, prompts):
    for sample in HFEngine(model).generate([GenerationRequest(prompt) for prompt in prompts], GREEDY):
        torch.testing.assert_close(
            torch.tensor(sample.log_probs).double(), teacher_forced(model, sample), atol=1e-5, rtol=0
        )


def test_samples_do_not_depend_on_the_batch(model, prompts):
    sampling = SamplingParams(n=3, max_new_tokens=30)
    together = HFEngine(model).generate(requests_for(prompts), sampling)
    small = HFEngine(model, max_rows=3, prefill_tokens=1)
    torch.manual_seed(5)
    alone = [sample for request in requests_for(prompts) for sample in small.generate([request], sampling)]
    assert [sample.token_ids for sample in together] == [sample.token_ids for sample in alone]
    assert len({sample.token_ids for sample in together}) == len(together)


@pytest.mark.parametrize("prefill_tokens", [1, 64, 4096])
def test_a_common_prefix_is_prefilled_once(model, prompts, prefill_tokens):
    shared = tuple(range(30, 70))
    lengthened = [shared + prompt for prompt in prompts] + [shared]
    widths = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    engine = HFEngine(model, prefill_tokens=prefill_tokens)
    samples = engine.generate(requests_for(lengthened), SamplingParams(n=2, max_new_tokens=12))
    handle.remove()
    # The last prompt keeps one token of its own.
    assert widths[0] == (1, 39)
    assert sum(rows for rows, columns in widths[1:] if columns > 1) <= len(lengthened)
    assert max(columns for _, columns in widths[1:]) == 41
    for sample in samples:
        expected = teacher_forced(model, sample)
        torch.testing.assert_close(torch.tensor(sample.log_probs).double(), expected, atol=1e-5, rtol=0)
    greedy = engine.generate([GenerationRequest(prompt) for prompt in lengthened], GREEDY)
    assert [sample.token_ids for sample in greedy] == [reference_greedy(model, prompt, 20) for prompt in lengthened]
    alone = [
        HFEngine(model).generate([request], SamplingParams(n=2, max_new_tokens=12))
        for request in requests_for(lengthened)
    ]
    assert [sample.token_ids for pair in alone for sample in pair] == [sample.token_ids for sample in samples]


def test_a_common_prefix_is_not_shared_across_a_window_of_attention(prompts):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=24, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    lengthened = [tuple(range(30, 70)) + prompt for prompt in prompts]
    samples = HFEngine(model).generate([GenerationRequest(prompt) for prompt in lengthened], GREEDY)
    assert [sample.token_ids for sample in samples] == [reference_greedy(model, prompt, 20) for prompt in lengthened]


def test_global_random_state_is_untouched(model, prompts):
    before = torch.get_rng_state()
    HFEngine(model).generate(requests_for(prompts), SamplingParams(max_new_tokens=4))
    assert torch.equal(torch.get_rng_state(), before)


def test_requests_without_seed_differ_and_repeat_with_the_engine_seed(model, prompts):
    requests = [GenerationRequest(prompts[0]), GenerationRequest(prompts[0])]
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    engine, twin, other = HFEngine(model, seed=1), HFEngine(model, seed=1), HFEngine(model, seed=2)
    first, again = engine.generate(requests, sampling), engine.generate(requests, sampling)
    assert first[0].token_ids != first[1].token_ids
    assert first[0].token_ids != again[0].token_ids
    assert twin.generate(requests, sampling) == first
    assert other.generate(requests, sampling)[0].token_ids != first[0].token_ids


def test_each_prompt_is_prefilled_once_for_its_samples(model, prompts):
    seen = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    HFEngine(model).generate(requests_for(prompts[:4]), SamplingParams(n=8, max_new_tokens=1))
    handle.remove()
    assert seen == [torch.Size([4, 40])]


def test_finished_rows_leave_the_batch(model, prompts):
    widths = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    requests = [GenerationRequest(prompt, max_new_tokens=place + 1) for place, prompt in enumerate(prompts)]
    samples = HFEngine(model).generate(requests, SamplingParams(temperature=0, ignore_eos=True))
    handle.remove()
    assert widths == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert [len(sample.token_ids) for sample in samples] == list(range(1, 11))
    assert [sample.token_ids for sample in samples] == [
        reference_greedy_past_end(model, prompt, place + 1) for place, prompt in enumerate(prompts)
    ]


def reference_greedy_past_end(model, prompt, count):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def test_sliding_window_and_learned_positions(prompts):
    shape = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    sliding = MistralForCausalLM(
        MistralConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            sliding_window=8, initializer_range=0.2, max_position_embeddings=256, **shape,
        )
    ).eval()  # fmt: skip
    learned = GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2, **shape)
    )
    for other in (sliding, learned.eval()):
        samples = HFEngine(other).generate([GenerationRequest(prompt) for prompt in prompts], GREEDY)
        assert [sample.token_ids for sample in samples] == [reference_greedy(other, prompt, 20) for prompt in prompts]


def test_model_settings_are_put_back(model, prompts):
    model.train()
    HFEngine(model).generate(requests_for(prompts), SamplingParams(max_new_tokens=2))
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_recurrent_models_are_refused_by_name():
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(UnsupportedCombinationError, match=r"'hf' and MambaForCausalLM"):
        HFEngine(recurrent)


def test_stop_string_keeps_the_token_that_completes_it(model, tokenizer, prompts):
    engine = HFEngine(model, tokenizer=tokenizer)
    free = engine.generate([GenerationRequest(prompts[3], seed=3)], SamplingParams(max_new_tokens=12, ignore_eos=True))[
        0
    ]
    text = tokenizer.decode(free.token_ids)
    stopped = engine.generate(
        [GenerationRequest(prompts[3], seed=3)], SamplingParams(max_new_tokens=12, ignore_eos=True, stop=(text[4:7],))
    )[0]
    assert stopped.token_ids == free.token_ids[:7]
    assert stopped.finish_reason is FinishReason.STOP


def test_stop_string_without_tokenizer_is_an_error(model, prompts):
    with pytest.raises(ValueError, match="no tokenizer"):
        HFEngine(model).generate(requests_for(prompts), SamplingParams(stop=("x",)))


def test_step_budget_gives_partial_samples_back(model, prompts):
    samples = HFEngine(model, max_rows=5).generate(
        requests_for(prompts), SamplingParams(max_new_tokens=6, ignore_eos=True), max_steps=8
    )
    # Two waves of five rows, longest prompts first: the first takes six steps, the second the two that are left.
    lengths = {len(sample.prompt_token_ids): len(sample.token_ids) for sample in samples}
    assert lengths == {40: 6, 22: 6, 12: 6, 9: 6, 7: 2, 5: 2, 3: 2, 2: 2, 1: 2}
    assert {sample.finish_reason for sample in samples if len(sample.token_ids) == 2} == {FinishReason.ABORT}
    assert {sample.finish_reason for sample in samples if len(sample.token_ids) == 6} == {FinishReason.LENGTH}
