"""Partial rollouts: bounded growth per step, versions of each token, bounded age, nothing lost."""

import json
from dataclasses import replace

from rft_engines import FinishReason, Generation, GenerationRequest, SamplingParams
from rft_trainer.experience.partial import PartialRollouts

LIMIT = 10
SAMPLING = SamplingParams(n=2, max_new_tokens=LIMIT)


class Engine:
    """Sample k of prompt p ends by itself after `lengths[p][k]` tokens; token t of it is 100 p + 10 k + t."""

    def __init__(self, lengths):
        self.lengths = lengths
        self.version = 0
        self.calls = []

    def __call__(self, requests, sampling):
        self.calls.append([(r.prompt_token_ids, r.token_budget(sampling, None)) for r in requests])
        return [self._one(r, k, sampling) for r in requests for k in range(sampling.n)]

    def _one(self, request, place, sampling):
        prompt, done = request.prompt_token_ids[0], len(request.prompt_token_ids) - 1
        if done:
            place = (request.prompt_token_ids[1] % 100) // 10
        length = self.lengths[prompt][place]
        budget = request.token_budget(sampling, None)
        ends = length <= done + budget
        tokens = [100 * prompt + 10 * place + t for t in range(done, length if ends else done + budget)]
        return Generation(
            request_id="",
            sample_index=place,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(tokens),
            log_probs=tuple(-float(t) for t in tokens),
            finish_reason=FinishReason.STOP if ends else FinishReason.LENGTH,
            weights_version=self.version,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
        )


def begin(partial, engine, *prompts):
    requests = [GenerationRequest((prompt,), seed=prompt) for prompt in prompts]
    return partial.step(list(prompts), requests, SAMPLING, version=engine.version)


def test_a_response_that_fills_the_context_is_finished():
    class Short(Engine):
        """An engine whose context holds five tokens: the prompt's and four of the response."""

        def _one(self, request, place, sampling):
            assert len(request.prompt_token_ids) < 5
            left = 5 - len(request.prompt_token_ids)
            return super()._one(
                replace(request, max_new_tokens=min(left, request.token_budget(sampling, None))), place, sampling
            )

    engine = Short({1: [2, 9]})
    partial = PartialRollouts(tokens=3, staleness=5, generate=engine)
    assert begin(partial, engine, 1) == []
    (group,) = begin(partial, engine)
    first, second = group.generations(SAMPLING)
    assert (len(first.token_ids), first.finish_reason) == (2, FinishReason.STOP)
    assert (len(second.token_ids), second.finish_reason) == (4, FinishReason.LENGTH)
    assert begin(partial, engine) == []


def test_a_long_response_goes_on_and_its_group_waits_for_it():
    engine = Engine({1: [2, 7], 2: [1, 3]})
    partial = PartialRollouts(tokens=3, staleness=5, generate=engine)
    engine.version = 1
    assert [group.item for group in begin(partial, engine, 1, 2)] == [2]
    engine.version = 2
    assert begin(partial, engine) == []
    engine.version = 3
    (group,) = begin(partial, engine)
    first, second = group.generations(SAMPLING)
    assert first.token_ids == (100, 101)
    assert second.token_ids == tuple(range(110, 117))
    assert second.log_probs == tuple(-float(t) for t in range(110, 117))
    assert second.prompt_token_ids == (1,)
    assert (second.weights_version, second.finish_reason) == (1, FinishReason.STOP)
    assert group.samples[1].versions == [1, 1, 1, 2, 2, 2, 3]


def test_the_whole_response_keeps_its_limit():
    engine = Engine({1: [99, 99]})
    partial = PartialRollouts(tokens=4, staleness=9, generate=engine)
    groups = [begin(partial, engine, 1), begin(partial, engine), begin(partial, engine)]
    assert groups[:2] == [[], []]
    (group,) = groups[2]
    assert [len(sample.token_ids) for sample in group.samples] == [LIMIT, LIMIT]
    assert all(generation.truncated for generation in group.generations(SAMPLING))
    assert [budget for _, budget in engine.calls[4]] == [2, 2]


def test_a_response_that_is_due_is_finished_within_the_step():
    """Begun at version 1 with staleness 2: version 3 may still add to it, so there it runs to its end."""
    engine = Engine({1: [9, 9]})
    partial = PartialRollouts(tokens=1, staleness=2, generate=engine)
    found = []
    for version in (1, 2, 3):
        engine.version = version
        found.append(begin(partial, engine, *([1] if version == 1 else [])))
    assert found[:2] == [[], []]
    assert found[2][0].samples[0].versions == [1, 2] + [3] * 7


def test_both_calls_are_made_whatever_this_rank_holds():
    engine = Engine({})
    partial = PartialRollouts(tokens=1, staleness=1, generate=engine)
    assert begin(partial, engine) == []
    assert engine.calls == [[], []]


def test_what_is_held_survives_a_checkpoint():
    engine = Engine({1: [2, 7]})
    partial = PartialRollouts(tokens=3, staleness=5, generate=engine)
    begin(partial, engine, 1)
    resumed = PartialRollouts(tokens=3, staleness=5, generate=engine)
    resumed.load_state_dict(json.loads(json.dumps(partial.state_dict())))
    assert [begin(partial, engine), begin(partial, engine)] == [begin(resumed, engine), begin(resumed, engine)]
