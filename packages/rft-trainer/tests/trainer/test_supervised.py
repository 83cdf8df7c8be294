"""Supervised steps: the loss is transformers' own, for every layout and split; budgets become numbers of steps."""

import pytest
import torch

from rft_trainer.data import Demonstration, PromptDataset, RecordFields, encode_demonstrations
from rft_trainer.errors import ConfigurationError
from rft_trainer.experience import Collator
from rft_trainer.models import Actor, load_causal_model, load_tokenizer
from rft_trainer.optim import ScheduleConfig, build_schedule, reschedule
from rft_trainer.testing import byte_tokenizer, tiny_model_folder
from rft_trainer.trainer.supervised import demonstrated, planned_steps, supervised_loss
from rft_trainer.trainer.wall_clock import WallClockGuard


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def prompts_of(tokenizer, questions):
    fields = RecordFields(reference_key=None)
    records = [fields.record({"question": text}, f"made:{number}") for number, text in enumerate(questions)]
    return PromptDataset(records, tokenizer, max_prompt_tokens=200)


def labelled_loss(model, examples, pad):
    """What transformers gives for the batch with labels on the answers only."""
    width = max(len(e.prompt_ids) + len(e.response_ids) for e in examples)
    ids = torch.full((len(examples), width), pad)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, example in enumerate(examples):
        start, end = len(example.prompt_ids), len(example.prompt_ids) + len(example.response_ids)
        ids[row, :end] = torch.tensor((*example.prompt_ids, *example.response_ids))
        labels[row, start:end] = torch.tensor(example.response_ids)
        mask[row, :end] = 1
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


@pytest.mark.parametrize("layout", ["right", "left", "packed"])
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[2], [0, 3], [1]]])
def test_loss_and_gradient_are_those_of_labels(folder, layout, split):
    tokenizer = load_tokenizer(folder)
    questions = ["1 + 1?", "a longer one, 2 + 2?", "3?", "what is 4 + 4 then"]
    answers = ["2", "it is\n#### 4", "#### 3", "4 and 4 are 8\n#### 8"]
    examples = encode_demonstrations(
        prompts_of(tokenizer, questions), answers, tokenizer, max_answer_tokens=40
    ).examples
    reference = load_causal_model(folder).float()
    expected = labelled_loss(reference, examples, tokenizer.pad_token_id)
    expected.backward()
    actor = Actor(load_causal_model(folder).float())
    collate = Collator(pad_token_id=tokenizer.pad_token_id, device=torch.device("cpu"), layout=layout)
    tokens = sum(len(example.response_ids) for example in examples)
    total = 0.0
    for rows in split:
        batch = collate([demonstrated(examples[row]) for row in rows])
        loss = supervised_loss(actor(batch.layout).log_probs, batch.loss_mask, tokens)
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(float(expected.detach()), abs=1e-6)
    wanted = dict(reference.named_parameters())
    for name, parameter in actor.model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name].grad, atol=1e-6), name


def test_an_answer_ends_its_turn_and_follows_the_ids_of_its_prompt():
    tokenizer = byte_tokenizer()
    prompts = prompts_of(tokenizer, ["a?", "b?"])
    made = encode_demonstrations(prompts, ["yes", "a much longer answer"], tokenizer, max_answer_tokens=6)
    (example,) = made.examples
    assert made.left_out == 1
    assert example == Demonstration(
        prompt_ids=prompts[0].token_ids,
        response_ids=(*tokenizer("yes")["input_ids"], tokenizer.eos_token_id),
        id="made:0",
    )


@pytest.mark.parametrize(
    ("answers", "limit", "words"),
    [
        (["one"], 9, "2 prompts and 1 answers"),
        (["one", " "], 9, "1 answers are empty, the first at made:1"),
        (["four", "five!"], 4, "none of 2 answers fits into generate_max_len 4; the shortest has 5 tokens"),
    ],
)
def test_answers_that_cannot_be_imitated_are_refused(answers, limit, words):
    tokenizer = byte_tokenizer()
    with pytest.raises(ConfigurationError, match=words):
        encode_demonstrations(prompts_of(tokenizer, ["a?", "b?"]), answers, tokenizer, max_answer_tokens=limit)


def test_a_budget_of_seconds_becomes_a_number_of_steps():
    def plan(taken, elapsed, timed):
        return planned_steps(taken, budget_seconds=100.0, elapsed_seconds=elapsed, timed_seconds=timed)

    assert plan(9, 40.0, 20.0) is None
    # 8 steps in 20 s are 2.5 s a step; the 60 s that are left are for 24 more
    assert plan(10, 40.0, 20.0) == 34
    # what is left is for no whole step
    assert plan(10, 98.0, 20.0) == 10
    # the budget ended in the third step
    assert plan(3, 101.0, 30.0) == 3


def test_another_schedule_goes_on_from_the_finished_steps():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=1.0)
    scheduler = build_schedule(optimizer, ScheduleConfig())
    rates = []
    for step in range(6):
        if step == 2:
            reschedule(scheduler, ScheduleConfig(kind="linear", total_steps=4, min_ratio=0.5))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    # after 3 of 4 steps 1 - 3/4 of the way from 1 to 0.5 is left: 0.625; at the end and behind it 0.5
    assert rates == [1.0, 1.0, 1.0, 0.625, 0.5, 0.5]


def test_the_guard_counts_a_round_and_the_evaluation_behind_it(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    guard = WallClockGuard(60.0, started=90.0)
    assert not WallClockGuard(None).is_over()
    guard.note("evaluation", 20.0)
    guard.note("step", 10.0)
    guard.note("step", 5.0)
    now = 119.0  # 29 s gone; 29 + 10 + 20 < 60
    assert not guard.is_over()
    now = 121.0
    assert guard.is_over()
