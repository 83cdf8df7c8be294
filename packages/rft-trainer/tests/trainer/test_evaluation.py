"""Evaluation: every item once for any number of ranks, three extractors, and nothing of the training state changed."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from rft_dist.testing import run_ranks
from rft_engines import Generation, SamplingParams
from rft_rewards import Grader, RewardComputationEngine, RewardRecipe, exact_answer
from rft_trainer import RFTConfig
from rft_trainer.data import PromptDataset, RecordFields
from rft_trainer.errors import ConfigurationError
from rft_trainer.experience import Collator, FastExperienceMaker, MicroBatchPlanner
from rft_trainer.experience.credit import CreditAssigner
from rft_trainer.session import credit_config
from rft_trainer.strategy import WorldDataParallel
from rft_trainer.testing import AloneDataParallel, byte_tokenizer
from rft_trainer.trainer import Evaluator, three_extractors

ITEMS = 37
FORMS = ("#### {}", "so it is {}", "\\boxed{{{}}}", "no idea")


class Scripted:
    """A rollout runtime that answers item i in form i mod 4, rightly unless i is 5; it draws from every generator."""

    weights_version = 1

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.seen = []

    def generate(self, requests, sampling):
        torch.rand(3), random.random(), np.random.rand()
        made = []
        for request in requests:
            item = int(request.request_id.rpartition("-")[2])
            self.seen.append(request.request_id)
            for sample in range(sampling.n):
                answer = item + (item == 5) + (100 if sampling.n > 1 and sample == item % 3 else 0)
                ids = self._tokenizer(FORMS[item % 4].format(answer))["input_ids"]
                made.append(
                    Generation(
                        request_id=request.request_id,
                        sample_index=sample,
                        temperature=sampling.temperature,
                        top_p=sampling.top_p,
                        top_k=sampling.top_k,
                        prompt_token_ids=request.prompt_token_ids,
                        token_ids=tuple(ids),
                        log_probs=(0.0,) * len(ids),
                        finish_reason="stop",
                        weights_version=1,
                    )
                )
        return made

    def awake(self):
        from contextlib import nullcontext

        return nullcontext()


def evaluator(data, folder=None, items=ITEMS, **options):
    tokenizer = byte_tokenizer()
    fields = RecordFields()
    records = [fields.record({"question": f"what is {i}?", "answer": str(i)}, f"made:{i}") for i in range(items)]
    prompts = PromptDataset(records, tokenizer, max_prompt_tokens=200)
    runtime = Scripted(tokenizer)
    maker = FastExperienceMaker(
        runtime=runtime,
        rewards=RewardComputationEngine(RewardRecipe(functions=[exact_answer("strict")])),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        credit=CreditAssigner(credit_config(RFTConfig()), data, RFTConfig().kl_controller()),
        planner=MicroBatchPlanner(data, responses=4),
        collator=Collator(pad_token_id=0, device=torch.device("cpu")),
        score_with_actor=False,
        base_seed=0,
    )
    grader = Grader(symbolic="off")
    chosen = {
        "sets": {"": prompts},
        "sampling": SamplingParams(temperature=0.0, max_new_tokens=50),
        "maker": maker,
        "data": data,
        "extractors": three_extractors(grader),
        "grader": grader,
        "folder": folder,
        **options,
    }
    return Evaluator(**chosen), runtime, prompts


def test_three_extractors_side_by_side(tmp_path):
    metrics = evaluator(AloneDataParallel(), tmp_path)[0].evaluate(3)
    # Of 37 items 10 are of each of the forms 0, 9 of the others; item 5 (form 1) is wrong. "no idea" has no number.
    assert metrics["eval/accuracy"] == metrics["eval/accuracy_strict"] == pytest.approx(10 / 37)
    assert metrics["eval/accuracy_flexible"] == pytest.approx((10 + 8 + 9) / 37)
    assert metrics["eval/accuracy_boxed"] == pytest.approx(9 / 37)
    assert metrics["eval/unanswered_strict"] == pytest.approx(27 / 37)
    assert metrics["eval/unanswered_flexible"] == pytest.approx(9 / 37)
    assert metrics["eval/unanswered_boxed"] == pytest.approx(28 / 37)
    assert metrics["eval/items"] == 37
    assert metrics["eval/accuracy_low"] < 10 / 37 < metrics["eval/accuracy_high"]
    rows = [json.loads(line) for line in (tmp_path / "eval_000003.rank0.jsonl").read_text().splitlines()]
    assert [row["item"] for row in rows] == list(range(37))
    assert rows[5]["extracted"]["accuracy_flexible"] == {"answer": "6", "score": 0.0}
    assert rows[2]["extracted"]["accuracy_boxed"] == {"answer": "2", "score": 1.0}
    assert metrics["eval/counts/accuracy/missing_answer"] == 27


def on_ranks(rank, world, folder):
    data = WorldDataParallel(torch.device("cpu"), None)
    sampling = SamplingParams(n=3, temperature=1.0, max_new_tokens=50)
    made, runtime, _ = evaluator(data, folder, sampling=sampling, pass_at=(1, 2), majority=True)
    return made.evaluate(0), runtime.seen


def test_every_item_once_and_the_same_numbers_for_any_world_size(tmp_path):
    """Three ranks, 37 items: shares of 13, 12 and 12."""
    results = run_ranks(on_ranks, 3, tmp_path, timeout_seconds=300)
    sampling = SamplingParams(n=3, temperature=1.0, max_new_tokens=50)
    alone, runtime, _ = evaluator(AloneDataParallel(), sampling=sampling, pass_at=(1, 2), majority=True)
    expected = alone.evaluate(0)
    for metrics, _ in results:
        assert metrics == pytest.approx(expected)
    assert sorted(name for _, seen in results for name in seen) == sorted(runtime.seen)
    assert len(set(runtime.seen)) == 37
    # One of three samples is wrong everywhere, so of the right items 2 of 3 are right each time.
    assert expected["eval/accuracy_strict"] == pytest.approx(10 / 37 * 2 / 3)
    assert expected["eval/accuracy_strict_pass_at_1"] == pytest.approx(10 / 37 * 2 / 3)
    assert expected["eval/accuracy_strict_pass_at_2"] == pytest.approx(10 / 37)
    assert expected["eval/accuracy_strict_majority"] == pytest.approx(10 / 37)
    lines = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert len(lines) == 37 * 3


def test_more_ranks_than_items():
    alone = evaluator(AloneDataParallel(), items=2)[0].evaluate(0)
    for metrics in run_ranks(two_items, 3, timeout_seconds=300):
        assert metrics == pytest.approx(alone, nan_ok=True)


def two_items(rank, world):
    return evaluator(WorldDataParallel(torch.device("cpu"), None), items=2)[0].evaluate(0)


def test_generators_are_as_before():
    made, _, _ = evaluator(AloneDataParallel())
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    made.evaluate(0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def test_several_sets_and_the_same_draws_at_every_step():
    made, runtime, prompts = evaluator(AloneDataParallel())
    made = replace(made, sets={"easy": prompts[:4], "hard": prompts[:2]})
    metrics = made.evaluate(1)
    assert metrics["eval/easy/accuracy"] == 0.25
    assert metrics["eval/easy/accuracy_flexible"] == 0.75
    assert metrics["eval/hard/accuracy"] == 0.5
    assert (metrics["eval/easy/items"], metrics["eval/hard/items"]) == (4, 2)
    first = list(runtime.seen)
    made.evaluate(2)
    assert runtime.seen == first * 2
    assert len(set(first)) == 6


def test_settings_of_an_evaluation_are_checked():
    for changes, message in [
        ({"eval_samples": 4}, "greedy responses are all alike"),
        ({"eval_samples": 2, "eval_temperature": 1.0, "eval_pass_at": (1, 3)}, "eval_pass_at has 3"),
        ({"eval_majority": True}, "give --eval_extractors too"),
        ({"eval_dataset": "a.jsonl", "eval_sets": ("b.jsonl",)}, "name all sets in eval_sets"),
        ({"eval_top_p": 0.0}, "eval_top_p is 0"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            RFTConfig(**changes)


def test_a_greedy_pass_stands_beside_the_sampled_one_and_changes_nothing_in_it(tmp_path):
    sampled = SamplingParams(n=2, temperature=1.0, max_new_tokens=50)
    data = AloneDataParallel()
    alone = evaluator(data, sampling=sampled, pass_at=(1, 2))[0].evaluate(3)
    both = evaluator(data, tmp_path, sampling=sampled, pass_at=(1, 2), greedy=True)[0].evaluate(3)
    assert {name: value for name, value in both.items() if not name.startswith("eval/greedy/")} == alone
    greedy = evaluator(data)[0].evaluate(3)
    assert both["eval/greedy/accuracy_flexible"] == greedy["eval/accuracy_flexible"]
    # one greedy response to an item estimates no pass@2
    assert "eval/greedy/accuracy_flexible_pass_at_1" in both
    assert "eval/greedy/accuracy_flexible_pass_at_2" not in both
    assert sorted(file.name for file in tmp_path.iterdir()) == ["eval_000003.rank0.jsonl", "greedy_000003.rank0.jsonl"]
