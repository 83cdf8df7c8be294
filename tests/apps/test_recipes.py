"""Recipes are configurations that hold together; a control differs from its recipe where it must; gold answers."""

import json
from dataclasses import fields, replace

import pytest
from gsm8k_app.gold_answers import demonstrations, worked_answer
from gsm8k_app.inputs import prepare_inputs
from gsm8k_app.recipes import RECIPES

from rft_trainer.cli import parse_config
from rft_trainer.config import RFTConfig
from rft_trainer.errors import ConfigurationError
from rft_trainer.models import load_tokenizer
from rft_trainer.testing import tiny_model_folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_parsed_and_a_flag_wins(name):
    config = parse_config(["--recipe", name, "--seed", "7"], RECIPES)
    assert config == replace(RECIPES[name](), seed=7)


def test_the_control_trains_on_gold_answers_alone():
    recipe, control = RECIPES["smollm2-gsm8k"](), RECIPES["smollm2-gsm8k-control"]()
    different = {item.name for item in fields(RFTConfig) if getattr(recipe, item.name) != getattr(control, item.name)}
    assert different == {"pretrain", "warm_start_epochs", "warm_start_seconds", "max_steps", "output_dir"}
    assert control.pretrain == str(recipe.output_dir / "warm_start")
    assert (control.max_steps, recipe.warm_starts, control.warm_starts) == (0, True, True)


def test_calculator_marks_are_taken_out():
    text = "He sold 48/2 = <<48/2=24>>24 clips.\nThat is $<<24*2=48>>48, if 3 < 4.\n#### 48"
    assert worked_answer(text) == "He sold 48/2 = 24 clips.\nThat is $48, if 3 < 4.\n#### 48"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def settings(model, file, rows, **changes):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RFTConfig(pretrain=model, dataset=str(file), warm_start_epochs=2, generate_max_len=40, **changes)


def test_demonstrations_are_worked_answers_behind_the_prompts_of_training(model, tmp_path):
    rows = [
        {"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
        {"question": "long?", "answer": "very " * 20 + "#### 1"},
    ]
    made = demonstrations(settings(model, tmp_path / "rows.jsonl", rows, system_prompt="Count."), model)
    (example,) = made.examples
    tokenizer = load_tokenizer(model)
    assert made.left_out == 1
    assert tokenizer.decode(example.response_ids) == "2 + 3 = 5\n#### 5<|im_end|>"
    assert tokenizer.decode(example.prompt_ids).endswith("user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n")
    assert "Count." in tokenizer.decode(example.prompt_ids)


def test_rollouts_are_made_for_short_answers_and_scored_by_their_calculations_where_asked(model, tmp_path):
    rows = [
        {"question": "long?", "answer": "so " * 30 + "2 + 3 = <<2+3=5>>5\n#### 5"},
        {"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    ]
    config = settings(model, tmp_path / "rows.jsonl", rows, eval_dataset=str(tmp_path / "rows.jsonl"))
    assert [p.record.reference for p in prepare_inputs(config).train] == ["5", "5"]
    inputs = prepare_inputs(replace(config, reference_max_len=40, partial_credit=0.5))
    assert [p.record.reference for p in inputs.train] == [rows[1]["answer"]]
    (held_out,) = inputs.held_out.values()
    assert [p.record.reference for p in held_out] == [row["answer"] for row in rows]
    with pytest.raises(ConfigurationError, match=r"reference_max_len is 1, and the shortest of 2 gold answers has \d+"):
        prepare_inputs(replace(config, reference_max_len=1))
    # What is demonstrated is not cut.
    assert demonstrations(replace(config, reference_max_len=40, generate_max_len=400), model).left_out == 0


def test_bare_answers_and_schedules_that_do_not_fit_are_refused(model, tmp_path):
    file = tmp_path / "rows.jsonl"
    with pytest.raises(ConfigurationError, match=r"1 rows have an answer without '####', the first at .*rows\.jsonl:1"):
        demonstrations(settings(model, file, [{"question": "2 + 3?", "answer": "5"}]), model)
    rows = [{"question": "2 + 3?", "answer": "#### 5"}]
    with pytest.raises(ConfigurationError, match="warm_start_lr_warmup_steps is 9 and the warm start has 2 steps"):
        demonstrations(settings(model, file, rows, warm_start_lr_warmup_steps=9), model)
