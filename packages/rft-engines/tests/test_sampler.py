"""The choice of tokens: pure functions on logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_engines import SamplingParams, UnsupportedCombinationError
from rft_engines.hf.sampler import choose_tokens, truncate
from rft_engines.hf.waves import Wave, common_prefix, equal_runs, plan_prefill, plan_waves
from rft_engines.seeds import UniformStream


def choose(logits, uniform, **sampling):
    tokens, log_probs = choose_tokens(
        torch.tensor([logits]), torch.tensor([uniform], dtype=torch.float64), SamplingParams(**sampling)
    )
    return int(tokens[0]), float(log_probs[0])


def test_log_prob_is_that_of_the_sampling_distribution():
    # softmax([2, 1, 0] / 0.6) and softmax([2, 1, 0]) at the first entry.
    token, log_prob = choose([2.0, 1.0, 0.0], 0.0, temperature=0.6)
    assert token == 0
    assert log_prob == pytest.approx(-0.202573, abs=1e-6)
    assert choose([2.0, 1.0, 0.0], 0.0, temperature=1.0)[1] == pytest.approx(-0.407606, abs=1e-6)
    assert math.exp(-0.407606 + 0.202573) == pytest.approx(0.8146, abs=1e-4)


def test_truncated_distribution_by_hand():
    # Probabilities .5 .3 .15 .05: top_p .8 keeps two (.5 < .8, .8 is not below .8), .81 keeps three.
    logits = [math.log(p) for p in (0.15, 0.5, 0.05, 0.3)]
    assert choose(logits, 0.0, top_p=0.79) == (1, pytest.approx(math.log(0.5 / 0.8)))
    assert choose(logits, 0.99, top_p=0.79) == (3, pytest.approx(math.log(0.3 / 0.8)))
    assert choose(logits, 0.0, top_p=0.81) == (0, pytest.approx(math.log(0.15 / 0.95)))
    assert choose(logits, 0.99, top_k=2) == (3, pytest.approx(math.log(0.3 / 0.8)))
    assert choose(logits, 0.5, top_k=3, top_p=0.5) == (1, pytest.approx(0.0, abs=1e-6))
    assert choose(logits, 0.9, top_p=1e-9) == (1, pytest.approx(0.0, abs=1e-6))


@pytest.mark.parametrize("vocabulary", [3, 127, 128, 129, 1000])
def test_tokens_follow_the_inverse_cumulative_distribution(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(64, vocabulary, generator=generator) * 3
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    tokens, log_probs = choose_tokens(logits, uniforms, SamplingParams())
    exact = torch.softmax(logits.double(), dim=-1)
    expected = torch.searchsorted(exact.cumsum(dim=-1), uniforms[:, None], right=True)[:, 0]
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(log_probs.double(), exact.gather(1, tokens[:, None])[:, 0].log(), atol=1e-5, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-50, 50) | st.just(-math.inf), min_size=1, max_size=300).filter(
        lambda values: max(values) > -math.inf
    ),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 5),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
)
def test_a_token_without_mass_is_never_chosen(logits, uniform, top_k, top_p):
    token, log_prob = choose(logits, uniform, top_k=top_k, top_p=top_p)
    assert logits[token] > -math.inf
    assert -1000 < log_prob <= 1e-6


def test_wide_vocabulary_falls_back_to_a_full_sort():
    logits = torch.zeros(1, 5000)
    kept, ids = truncate(logits, 0, 0.9)
    assert int(torch.isfinite(kept).sum()) == pytest.approx(4500, abs=2)
    assert torch.equal(ids, torch.arange(5000)[None])


def test_frequencies_match_probabilities():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    uniforms = torch.tensor([UniformStream(3).at(place) for place in range(20000)], dtype=torch.float64)
    tokens, _ = choose_tokens(probabilities.log().expand(20000, -1), uniforms, SamplingParams())
    found = torch.bincount(tokens, minlength=4) / 20000
    torch.testing.assert_close(found, probabilities, atol=0.012, rtol=0)


def test_uniform_stream_is_the_published_generator():
    # First outputs of SplitMix64 with seed 1234567 (the reference implementation's test vector).
    assert [int(UniformStream(1234567).at(place) * 2**53) for place in range(2)] == [
        6457827717110365317 >> 11,
        3203168211198807973 >> 11,
    ]


def test_waves_are_sorted_and_within_limits():
    waves = plan_waves([3, 9, 5, 1], [4, 4, 4, 4], samples=2, max_rows=4, max_tokens=1000)
    assert waves == [Wave((1, 2), 9, 13), Wave((0, 3), 3, 7)]
    tight = plan_waves([3, 9, 5, 1], [4, 4, 4, 4], samples=1, max_rows=64, max_tokens=20)
    assert [wave.places for wave in tight] == [(1,), (2, 0), (3,)]
    assert [wave.places for wave in plan_waves([50], [50], samples=9, max_rows=4, max_tokens=10)] == [(0,)]
    assert plan_waves([], [], samples=1, max_rows=4, max_tokens=10) == []


def test_prefill_is_cut_by_padded_tokens():
    assert plan_prefill([9, 5, 3, 1], max_tokens=18) == [range(2), range(2, 4)]
    assert plan_prefill([9, 5], max_tokens=1) == [range(1), range(1, 2)]


def test_the_first_token_may_have_a_temperature_of_its_own():
    sampling = SamplingParams(temperature=0.5, top_k=3, first_token_temperature=2.0)
    assert sampling.at(0) == SamplingParams(temperature=2.0, top_k=3)
    assert sampling.at(1) is sampling
    assert SamplingParams(temperature=0.5).at(0) == SamplingParams(temperature=0.5)
    with pytest.raises(UnsupportedCombinationError, match=r"'vllm' and first_token_temperature=2\.0"):
        sampling.refuse_first_token_temperature("vllm")


@pytest.mark.parametrize(
    "changes", [{"first_token_temperature": 0.0}, {"temperature": 0, "first_token_temperature": 1}]
)
def test_a_first_temperature_that_cannot_be_sampled_with_is_refused(changes):
    with pytest.raises(ValueError, match="first_token_temperature"):
        SamplingParams(**changes)


def test_what_prompts_share_and_where_lengths_repeat():
    assert common_prefix([(1, 2, 3, 4), (1, 2, 5), (1, 2, 3, 9)]) == 2
    assert common_prefix([(1, 2), (1, 2)]) == 1, "each keeps a token of its own"
    assert common_prefix([(3,), (1, 2)]) == 0
    assert equal_runs([9, 9, 5, 3, 3]) == [range(2), range(2, 3), range(3, 5)]
    assert equal_runs([]) == []
