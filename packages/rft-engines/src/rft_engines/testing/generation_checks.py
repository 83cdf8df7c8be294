"""Checks of what `generate` returns."""

from rft_engines.errors import InvalidRequestError, PromptTooLongError, UnsupportedCombinationError
from rft_engines.generation import FinishReason, Generation, GenerationRequest
from rft_engines.protocol import EngineState, RolloutEngine
from rft_engines.sampling import SamplingParams
from rft_engines.seeds import sample_seed
from rft_engines.testing.probe import GREEDY, SAMPLED, Check, EngineProbe, require, require_equal, require_refused


def _tokens(samples: list[Generation]) -> list[tuple[int, ...]]:
    return [sample.token_ids for sample in samples]


def samples_come_prompt_by_prompt(engine: RolloutEngine, probe: EngineProbe) -> None:
    samples = engine.generate(probe.requests(), SAMPLED)
    found = [(sample.request_id, sample.sample_index) for sample in samples]
    expected = [(request.request_id, index) for request in probe.requests() for index in range(2)]
    require_equal(found, expected, "order of samples")


def a_request_without_id_gets_its_place(engine: RolloutEngine, probe: EngineProbe) -> None:
    samples = engine.generate([GenerationRequest(prompt) for prompt in probe.prompts], GREEDY)
    require_equal([sample.request_id for sample in samples], [str(i) for i in range(len(samples))], "request ids")


def prompts_come_back_as_sent(engine: RolloutEngine, probe: EngineProbe) -> None:
    found = [sample.prompt_token_ids for sample in engine.generate(probe.requests(), GREEDY)]
    require_equal(found, [tuple(prompt) for prompt in probe.prompts], "prompt ids")


def every_token_has_a_log_prob(engine: RolloutEngine, probe: EngineProbe) -> None:
    for sample in engine.generate(probe.requests(), SAMPLED):
        require_equal(len(sample.log_probs), len(sample.token_ids), "number of log-probabilities")
        require(all(-1e4 < value <= 1e-6 for value in sample.log_probs), f"log-probabilities {sample.log_probs}")


def token_ids_are_in_the_vocabulary(engine: RolloutEngine, probe: EngineProbe) -> None:
    for sample in engine.generate(probe.requests(), SAMPLED):
        require(all(0 <= token < probe.vocab_size for token in sample.token_ids), f"token ids {sample.token_ids}")


def sampling_facts_and_version_are_recorded(engine: RolloutEngine, probe: EngineProbe) -> None:
    top_p, top_k = (0.9, 5) if probe.truncation else (1.0, 0)
    sampling = SamplingParams(temperature=0.7, top_p=top_p, top_k=top_k, max_new_tokens=2)
    for sample in engine.generate(probe.requests(), sampling):
        require_equal((sample.temperature, sample.top_p, sample.top_k), (0.7, top_p, top_k), "sampling facts")
        require_equal(sample.weights_version, engine.weights_version, "weights version")


def no_requests_give_no_samples(engine: RolloutEngine, probe: EngineProbe) -> None:
    require_equal(engine.generate([], SAMPLED), [], "samples of an empty call")


def equal_seeds_give_equal_tokens(engine: RolloutEngine, probe: EngineProbe) -> None:
    if not probe.seeded:
        return
    first, second = (_tokens(engine.generate(probe.requests(), SAMPLED)) for _ in range(2))
    require_equal(second, first, "tokens of the second call with the same seeds")


def tokens_do_not_depend_on_the_batch(engine: RolloutEngine, probe: EngineProbe) -> None:
    if not probe.seeded:
        return
    together = _tokens(engine.generate(probe.requests(), SAMPLED))
    alone = [tokens for request in probe.requests() for tokens in _tokens(engine.generate([request], SAMPLED))]
    require_equal(alone, together, "tokens of each request alone")


def n_samples_equal_n_seeded_requests(engine: RolloutEngine, probe: EngineProbe) -> None:
    if not probe.seeded:
        return
    together = _tokens(engine.generate(probe.requests(), SAMPLED))
    expanded = [
        GenerationRequest(request.prompt_token_ids, seed=sample_seed(request.seed or 0, index))
        for request in probe.requests()
        for index in range(2)
    ]
    one = SamplingParams(max_new_tokens=SAMPLED.max_new_tokens, ignore_eos=True)
    require_equal(_tokens(engine.generate(expanded, one)), together, "tokens of requests expanded by sample_seed")


def samples_of_a_prompt_differ(engine: RolloutEngine, probe: EngineProbe) -> None:
    sampling = SamplingParams(n=4, max_new_tokens=6, ignore_eos=True)
    found = set(_tokens(engine.generate(probe.requests()[:1], sampling)))
    require(len(found) > 1, f"four samples are all {found}")


def unseeded_calls_differ(engine: RolloutEngine, probe: EngineProbe) -> None:
    first, second = (_tokens(engine.generate(probe.requests(seed=None), SAMPLED)) for _ in range(2))
    require(first != second, f"two unseeded calls both gave {first}")


def greedy_ignores_seeds(engine: RolloutEngine, probe: EngineProbe) -> None:
    first = _tokens(engine.generate(probe.requests(seed=1), GREEDY))
    require_equal(_tokens(engine.generate(probe.requests(seed=2), GREEDY)), first, "greedy tokens with other seeds")


def top_k_of_one_is_greedy_and_certain(engine: RolloutEngine, probe: EngineProbe) -> None:
    sampling = SamplingParams(top_k=1, max_new_tokens=6, ignore_eos=True)
    if not probe.truncation:
        require_refused(lambda: engine.generate(probe.requests(), sampling), "top_k", UnsupportedCombinationError)
        return
    samples = engine.generate(probe.requests(), sampling)
    require_equal(_tokens(samples), _tokens(engine.generate(probe.requests(), GREEDY)), "tokens with top_k=1")
    largest = max(abs(value) for sample in samples for value in sample.log_probs)
    require(largest < 1e-5, f"log-probability {-largest} of the only token left, expected 0")


def a_long_response_is_cut_at_the_budget(engine: RolloutEngine, probe: EngineProbe) -> None:
    for sample in engine.generate(probe.requests(), GREEDY):
        require_equal(len(sample.token_ids), GREEDY.max_new_tokens, "tokens")
        require_equal(sample.finish_reason, FinishReason.LENGTH, "finish reason")


def a_request_may_lower_the_budget(engine: RolloutEngine, probe: EngineProbe) -> None:
    short = GenerationRequest(tuple(probe.prompts[0]), max_new_tokens=2)
    first, second = engine.generate([short, GenerationRequest(tuple(probe.prompts[1]))], GREEDY)
    require_equal((len(first.token_ids), len(second.token_ids)), (2, GREEDY.max_new_tokens), "tokens")


def a_stop_id_is_kept_and_ends(engine: RolloutEngine, probe: EngineProbe) -> None:
    free = engine.generate(probe.requests()[:1], GREEDY)[0].token_ids
    stop = free[2]
    sampling = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True, stop_token_ids=(stop,))
    sample = engine.generate(probe.requests()[:1], sampling)[0]
    require_equal(sample.token_ids, free[: free.index(stop) + 1], "tokens up to the stop id")
    require_equal(sample.finish_reason, FinishReason.STOP, "finish reason")


def log_probs_are_of_the_distribution_sampled_from(engine: RolloutEngine, probe: EngineProbe) -> None:
    if probe.reference is None:
        return
    for temperature in (1.0, 0.6):
        sampling = SamplingParams(temperature=temperature, max_new_tokens=6, ignore_eos=True)
        for sample in engine.generate(probe.requests(), sampling):
            expected = probe.reference(sample.prompt_token_ids, sample.token_ids, temperature)
            gap = max(abs(a - b) for a, b in zip(sample.log_probs, expected, strict=True))
            require(gap <= probe.tolerance, f"log-probabilities are {gap} off at temperature {temperature}")


def an_id_outside_the_vocabulary_is_refused(engine: RolloutEngine, probe: EngineProbe) -> None:
    wrong = GenerationRequest((*probe.prompts[0], probe.vocab_size))
    require_refused(lambda: engine.generate([*probe.requests(), wrong], GREEDY), "vocabulary", InvalidRequestError)
    require_equal(engine.state, EngineState.READY, "state after a refused request")


def a_prompt_without_room_is_refused(engine: RolloutEngine, probe: EngineProbe) -> None:
    limit = engine.max_model_len
    if limit is None:
        return
    prompt = tuple(probe.prompts[0][:1]) * limit
    require_refused(lambda: engine.generate([GenerationRequest(prompt)], GREEDY), "max_model_len", PromptTooLongError)
    sample = engine.generate([GenerationRequest(prompt[:-2])], GREEDY)[0]
    require_equal(len(sample.token_ids), 2, "tokens with room for two")
    require_equal(sample.finish_reason, FinishReason.LENGTH, "finish reason")


def a_step_budget_gives_partial_samples(engine: RolloutEngine, probe: EngineProbe) -> None:
    if not probe.step_budget:
        require_refused(
            lambda: engine.generate(probe.requests(), GREEDY, max_steps=3), "max_steps", UnsupportedCombinationError
        )
        return
    full = _tokens(engine.generate(probe.requests(), GREEDY))
    partial = engine.generate(probe.requests(), GREEDY, max_steps=3)
    require({sample.finish_reason for sample in partial} == {FinishReason.ABORT}, "not all samples were aborted")
    require_equal(_tokens(partial), [tokens[:3] for tokens in full], "partial tokens")


GENERATION_CHECKS = tuple(
    Check(run.__name__.replace("_", " "), run)
    for run in (
        samples_come_prompt_by_prompt,
        a_request_without_id_gets_its_place,
        prompts_come_back_as_sent,
        every_token_has_a_log_prob,
        token_ids_are_in_the_vocabulary,
        sampling_facts_and_version_are_recorded,
        no_requests_give_no_samples,
        equal_seeds_give_equal_tokens,
        tokens_do_not_depend_on_the_batch,
        n_samples_equal_n_seeded_requests,
        samples_of_a_prompt_differ,
        unseeded_calls_differ,
        greedy_ignores_seeds,
        top_k_of_one_is_greedy_and_certain,
        a_long_response_is_cut_at_the_budget,
        a_request_may_lower_the_budget,
        a_stop_id_is_kept_and_ends,
        log_probs_are_of_the_distribution_sampled_from,
        an_id_outside_the_vocabulary_is_refused,
        a_prompt_without_room_is_refused,
        a_step_budget_gives_partial_samples,
    )
)
