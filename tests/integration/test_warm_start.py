"""A warm start does not depend on how it is spread, its model is a folder like any other, and it teaches."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rft_dist.testing import run_ranks
from rft_trainer.config import RFTConfig
from rft_trainer.data import PromptDataset, RecordFields, encode_demonstrations
from rft_trainer.models import load_tokenizer
from rft_trainer.strategy import get_strategy
from rft_trainer.testing import tiny_model_folder
from rft_trainer.warm_start import FOLDER, METRICS, read_record, warm_start

WORDS = ("red", "green", "blue", "white", "black", "grey")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def demonstrations(tokenizer):
    """The answer to each word is the word itself, some longer than others."""
    fields = RecordFields(reference_key=None)
    records = [fields.record({"question": word}, f"made:{word}") for word in WORDS]
    prompts = PromptDataset(records, tokenizer, max_prompt_tokens=100)
    answers = [word * (1 + number % 2) for number, word in enumerate(WORDS)]
    return encode_demonstrations(prompts, answers, tokenizer, max_answer_tokens=50)


def settings(folder, output, **changes):
    """Batches of 4 of 6 answers: every second one has only 2, which leaves two of four ranks without any."""
    base = RFTConfig(
        pretrain=folder,
        fsdp=True,
        output_dir=Path(output),
        warm_start_steps=4,
        warm_start_batch_size=4,
        warm_start_micro_batch_size=8,
        warm_start_learning_rate=1e-2,
        # what rollouts are sampled from does not matter to gold answers
        temperature=0.5,
        top_k=3,
    )
    return replace(base, **changes)


def train(rank, world, config):
    """The warm start; what it did."""
    tokenizer = load_tokenizer(config.pretrain)
    with get_strategy(config).setup_distributed() as strategy:
        strategy.on_main(lambda: config.output_dir.mkdir(parents=True, exist_ok=True))
        done = warm_start(
            config,
            strategy,
            folder=config.pretrain,
            tokenizer=tokenizer,
            demonstrations=demonstrations(tokenizer),
            say=lambda text: None,
        )
    return done


def outcome(world, config):
    done = run_ranks(train, world, config, timeout_seconds=500)
    assert {(d.steps, d.trained_tokens, d.first_loss) for d in done} == {
        (done[0].steps, done[0].trained_tokens, done[0].first_loss)
    }
    rows = [json.loads(line) for line in (config.output_dir / METRICS).read_text().splitlines()]
    weights = AutoModelForCausalLM.from_pretrained(config.output_dir / FOLDER).state_dict()
    return rows, weights


def assert_same(found, expected):
    for row, wanted in zip(found[0], expected[0], strict=True):
        for name in ("step", "warm_start/trained_tokens", "warm_start/tokens", "warm_start/answers"):
            assert row[name] == wanted[name]
        for name in ("warm_start/loss", "warm_start/grad_norm", "warm_start/learning_rate"):
            assert row[name] == pytest.approx(wanted[name], rel=1e-4), name
    for name, tensor in expected[1].items():
        assert torch.allclose(found[1][name], tensor, atol=5e-5), name


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    return outcome(1, settings(folder, tmp_path_factory.mktemp("alone")))


def test_two_ranks_packed_by_a_token_budget_give_the_same_as_one(folder, alone, tmp_path):
    config = settings(folder, tmp_path / "run", warm_start_packing=True, warm_start_max_tokens=60)
    assert_same(outcome(2, config), alone)
    record = read_record(config.output_dir)
    assert (record["steps"], record["examples"], record["left_out"], record["ranks"]) == (4, 6, 0, 2)
    # two epochs: 4 + 2 + 4 + 2 answers
    assert (record["answers"], record["epochs"]) == (12, 2.0)
    for rank in range(2):
        entry = json.loads((config.output_dir / f"memory.rank{rank}.jsonl").read_text())
        assert (entry["step"], entry["phase"]) == (0, "warm_start")
        for owner in ("actor", "actor optimiser"):
            assert entry["measured"][owner] == pytest.approx(entry["expected"][owner], rel=0.1)
        assert {"gradients", "activations"} <= set(entry["expected"])
    # each answer is a word or two of the same and the end token
    lengths = [len(word) * (1 + number % 2) + 1 for number, word in enumerate(WORDS)]
    assert record["trained_tokens"] == 2 * sum(lengths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (1, {"warm_start_micro_batch_size": 1}),
        (2, {"warm_start_micro_batch_size": 1}),
        (4, {"warm_start_packing": True}),
        (2, {"fsdp": False, "zero_stage": 0}),
        (2, {"fsdp": False, "zero_stage": 2, "warm_start_packing": True}),
        (4, {"fsdp": False, "zero_stage": 3, "warm_start_micro_batch_size": 1}),
    ],
)
def test_every_split_gives_the_same(folder, alone, tmp_path, world, changes):
    assert_same(outcome(world, settings(folder, tmp_path / "run", **changes)), alone)


@pytest.mark.slow
def test_all_ranks_stop_where_the_first_ones_clock_says(folder, tmp_path):
    config = settings(folder, tmp_path / "run", warm_start_steps=None, warm_start_seconds=6.0)
    rows, _ = outcome(2, config)
    record = read_record(config.output_dir)
    assert record["steps"] == len(rows) > 10
    assert record["budget_seconds"] == 6.0
    # the decay was laid over the planned number: the last step had nearly a tenth of the peak
    assert rows[-1]["warm_start/learning_rate"] < 0.2 * 1e-2
    assert rows[9]["warm_start/learning_rate"] == 1e-2


@pytest.mark.slow
def test_it_teaches(folder, tmp_path):
    """Each word is to be said back; greedy decoding does so afterwards, and does not before."""
    config = settings(folder, tmp_path / "run", warm_start_steps=150, warm_start_batch_size=6)
    run_ranks(train, 1, config, timeout_seconds=500)
    tokenizer = load_tokenizer(folder)
    examples = demonstrations(tokenizer).examples

    def said(model_folder):
        model = AutoModelForCausalLM.from_pretrained(model_folder)
        right = 0
        for example in examples:
            ids = torch.tensor([example.prompt_ids])
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
            right += tuple(made[0, ids.shape[1] :].tolist()) == example.response_ids
        return right

    assert said(folder) == 0
    assert said(config.output_dir / FOLDER) == len(WORDS)
