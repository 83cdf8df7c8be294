"""gather_and_generate on gloo ranks, with an engine whose every answer is scripted."""

import pytest

from rft_dist import ParallelLayout, build_rollout_groups
from rft_dist.testing import run_ranks
from rft_engines import EngineConfig, EngineError, GenerationRequest, SamplingParams, gather_and_generate
from rft_engines.testing import ScriptedEngine

VOCABULARY = 50
SAMPLING = SamplingParams(n=2, max_new_tokens=4)


def echo(request, sample_index):
    return (*request.prompt_token_ids, 30 + sample_index)


def generate_on_rank(rank, world_size, counts, tp_size, mode=""):
    groups = build_rollout_groups(ParallelLayout(world_size, tp_size), timeout_seconds=30)
    engine = ScriptedEngine.answering(echo, vocab_size=VOCABULARY, eos_token_id=2)
    requests = [
        GenerationRequest((3 + 10 * rank + place,), images=("picture",) * (mode == "images" and rank == 1))
        for place in range(counts[rank])
    ]
    sampling = SAMPLING
    if mode == "bad id" and rank == 1:
        requests.append(GenerationRequest((VOCABULARY,)))
    if mode == "other sampling" and rank == 1:
        sampling = SamplingParams(n=3)
    if mode == "engine fails" and rank == 1:
        engine.sleep()
    samples = gather_and_generate(engine, requests, sampling, groups)
    seen = [len(call[0]) for call in engine.calls]
    pictures = [len(request.images) for call in engine.calls for request in call[0]]
    groups.close()
    return [(sample.prompt_token_ids, sample.token_ids) for sample in samples], seen, pictures


@pytest.mark.parametrize("counts", [(3, 1), (3, 2), (0, 2), (2, 2), (0, 0)])
def test_each_rank_gets_its_own_samples_in_order(counts):
    results = run_ranks(generate_on_rank, 2, counts, 2, timeout_seconds=60)
    for rank, (samples, seen, _) in enumerate(results):
        prompts = [3 + 10 * rank + place for place in range(counts[rank])]
        assert samples == [((prompt,), (prompt, 30 + index, 2)) for prompt in prompts for index in (0, 1)]
        assert seen == ([sum(counts)] if sum(counts) else []), "each prompt is sent once, whatever n is"


def test_single_rank_groups_generate_alone():
    results = run_ranks(generate_on_rank, 2, (2, 1), 1, timeout_seconds=60)
    assert [seen for _, seen, _ in results] == [[2], [1]]


def test_text_and_images_in_one_group():
    results = run_ranks(generate_on_rank, 2, (1, 2), 2, "images", timeout_seconds=60)
    assert [len(samples) for samples, _, _ in results] == [2, 4]
    assert [pictures for _, _, pictures in results] == [[0, 1, 1]] * 2


def failing_rank(rank, world_size, mode):
    try:
        generate_on_rank(rank, world_size, (1, 1), 2, mode)
    except Exception as error:  # noqa: BLE001
        return type(error).__mro__[1].__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("mode", "words"),
    [("bad id", "vocabulary"), ("other sampling", "different sampling"), ("engine fails", "wake_up()")],
)
def test_an_error_on_one_rank_reaches_its_group(mode, words):
    results = run_ranks(failing_rank, 2, mode, timeout_seconds=60)
    assert all(result is not None and words in result[1] for result in results), results


def seeded_rank(rank, world_size, seed):
    groups = build_rollout_groups(ParallelLayout(world_size, 2), timeout_seconds=30)
    config = EngineConfig(model_path="unused", tp_size=2, seed=seed)
    engine_seed = groups.layout.engine_seed(config.seed)
    # Flat logits: tokens are the random numbers.
    engine = ScriptedEngine(lambda request, index, tokens: [0.0] * VOCABULARY, vocab_size=VOCABULARY, seed=engine_seed)
    requests = [GenerationRequest((5,))] if groups.layout.tp_rank == 0 else []
    generated = engine.generate([GenerationRequest((5,))], SamplingParams(max_new_tokens=16))
    shared = gather_and_generate(engine, requests, SamplingParams(max_new_tokens=16), groups)
    groups.close()
    return engine_seed, generated[0].token_ids, len(shared)


@pytest.mark.parametrize("seed", [7, None])
def test_seeds_are_equal_in_a_group_and_differ_between_groups(seed):
    results = run_ranks(seeded_rank, 4, seed, timeout_seconds=90)
    first = seed or 0
    assert [engine_seed for engine_seed, _, _ in results] == [first, first, first + 1, first + 1]
    tokens = [tokens for _, tokens, _ in results]
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]
    assert [count for _, _, count in results] == [1, 0, 1, 0]


def test_without_groups_nothing_is_sent():
    engine = ScriptedEngine.answering(echo, vocab_size=VOCABULARY, eos_token_id=2)
    samples = gather_and_generate(engine, [GenerationRequest((4,)), GenerationRequest((5,))], SAMPLING)
    assert [sample.token_ids for sample in samples] == [(4, 30, 2), (4, 31, 2), (5, 30, 2), (5, 31, 2)]
    with pytest.raises(EngineError):
        gather_and_generate(engine, [GenerationRequest((VOCABULARY,))], SAMPLING)
