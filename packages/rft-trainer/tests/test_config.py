"""One configuration: every problem at once, every value named."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from rft_trainer.cli import parse_config
from rft_trainer.config import RFTConfig
from rft_trainer.config.help import EVERYDAY, field_texts
from rft_trainer.config.lora import LoRAOptions
from rft_trainer.config.reading import load_config, setting_groups
from rft_trainer.errors import ConfigurationError
from rft_trainer.roles import engine_config


def test_all_problems_come_at_once_with_value_and_remedy():
    with pytest.raises(ConfigurationError) as caught:
        RFTConfig(max_steps=-1, top_p=1.5, n_samples_per_prompt=0, input_template="no place", lr_scheduler="steps")
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    for words in (
        ("max_steps", "-1"),
        ("top_p", "1.5"),
        ("n_samples_per_prompt", "0"),
        ("input_template", "{}"),
        ("steps",),
    ):
        assert any(all(word in line for word in words) for line in lines), words


def test_a_run_without_a_round_keeps_its_schedule_unused():
    config = RFTConfig(max_steps=0, lr_scheduler="cosine", lr_warmup_steps=5)
    assert config.actor_optimizer().schedule.total_steps == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warm_start_epochs": 2, "warm_start_steps": 5}, "warm_start_epochs 2 and warm_start_steps 5"),
        ({"warm_start_seconds": 0.0}, "warm_start_seconds is 0"),
        ({"warm_start_lr_min_ratio": 2.0}, "warm_start_lr_min_ratio"),
        ({"warm_start_lr_scheduler": "steps"}, "warm_start_lr_scheduler"),
        ({"warm_start_batch_size": 0}, "warm_start_batch_size is 0"),
        ({"max_seconds": 0.0}, "max_seconds is 0"),
        ({"eval_greedy": True}, "eval_greedy and eval_temperature 0"),
    ],
)
def test_settings_of_warm_start_and_evaluation_that_cannot_work(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        RFTConfig(**settings)


def test_a_batch_that_the_rollout_does_not_fill_is_refused():
    with pytest.raises(ConfigurationError, match=r"train_batch_size is 5.*64 responses.*8 x n_samples_per_prompt 8"):
        RFTConfig(train_batch_size=5)
    assert RFTConfig(train_batch_size=16, max_epochs=2).updates_per_step == 8
    assert RFTConfig().updates_per_step == 1


def test_flags_override_a_recipe_and_every_field_is_a_flag(capsys):
    recipes = {"small": lambda: RFTConfig(max_steps=3, seed=5)}
    config = parse_config(["--recipe", "small", "--seed", "7", "--fsdp", "--freeze", "a", "b"], recipes)
    assert (config.max_steps, config.seed, config.fsdp, config.freeze) == (3, 7, True, ("a", "b"))
    assert parse_config(["--recipe=small"], recipes).seed == 5
    with pytest.raises(SystemExit) as done:
        parse_config(["--help_all"], recipes)
    assert done.value.code == 0
    shown = capsys.readouterr().out
    for item in fields(RFTConfig):
        assert f"--{item.name}" in shown, item.name


def test_unknown_recipe_and_unknown_flag(capsys):
    recipes = {"small": RFTConfig}
    with pytest.raises(ConfigurationError, match=r"'big'.*small"):
        parse_config(["--recipe", "big"], recipes)
    with pytest.raises(SystemExit) as done:
        parse_config(["--max_stepz", "3"], recipes)
    assert done.value.code == 2
    assert "max_stepz" in capsys.readouterr().err


def test_flags_win_over_a_file_which_wins_over_a_recipe(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'seed = 3\noutput_dir = "runs/x"\n[optimizer]\nactor_learning_rate = 1\nadam_betas = [0.8, 0.9]\n'
        'freeze = ["a"]\n'
        '[run]\nmax_steps = 4\n[distribution]\nprecision = "fp32"\n'
    )
    recipes = {"small": lambda: RFTConfig(max_steps=3, seed=5, temperature=0.5)}
    config = parse_config(["--recipe", "small", "--config", str(file), "--seed", "7"], recipes)
    assert (config.seed, config.max_steps, config.temperature) == (7, 4, 0.5)
    assert (config.output_dir, config.adam_betas, config.freeze) == (Path("runs/x"), (0.8, 0.9), ("a",))
    assert type(config.actor_learning_rate) is float
    assert config.precision == "fp32"


def test_the_configuration_that_a_run_saved_is_read_again(tmp_path):
    made = RFTConfig(freeze=("a", "b"), resume_from=tmp_path, top_p=0.5, fsdp=True, eval_sets=("a.jsonl",))
    (tmp_path / "config.json").write_text(json.dumps(made.as_dict()))
    assert load_config(tmp_path / "config.json") == made
    assert parse_config(["--config", str(tmp_path / "config.json"), "--no_fsdp"], {}) == replace(made, fsdp=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_stepz = 3", r"'max_stepz' is no setting; did you mean max_steps\?"),
        ("[optimiser]\nmax_norm = 1", r"table \[optimiser\] is no group.*did you mean optimizer\?"),
        ('max_steps = "3"', "max_steps is '3': expected a whole number"),
        ("max_steps = 3.5", "max_steps is 3.5: expected a whole number"),
        ("fsdp = 1", "fsdp is 1: expected true or false"),
        ("zero_stage = 4", "zero_stage is 4: expected one of 0, 1, 2, 3"),
        ("zero_stage = true", "zero_stage is True: expected one of"),
        ("freeze = 'a'", "freeze is 'a': expected a list of text"),
        ("adam_betas = [1.0]", r"adam_betas is \[1.0\]: expected a list of a number"),
        ("eval_limit = 'x'", "eval_limit is 'x': expected a whole number or nothing"),
        ("max_steps = -1", "max_steps is -1"),
        ("max_steps 3", "cannot be read"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        parse_config(["--config", str(tmp_path / "run.toml")], {})


def test_a_file_that_is_missing_or_holds_a_list(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        load_config(tmp_path / "run.toml")
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="holds list"):
        load_config(tmp_path / "run.json")


def shown_help(capsys, *flags, recipes=None):
    with pytest.raises(SystemExit) as done:
        parse_config(list(flags), recipes or {})
    assert done.value.code == 0
    return capsys.readouterr().out


def test_help_is_grouped_and_short(capsys):
    shown = shown_help(capsys, "--help", "--recipe", "small", recipes={"small": lambda: RFTConfig(max_steps=33)})
    lines = shown.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120
    headings = [line.partition(":")[0] for line in lines if line and not line.startswith((" ", "-", "usage"))]
    assert headings == list(setting_groups())
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert sorted(flags) == sorted(f"--{name}" for name in EVERYDAY)
    assert "Rollout and update rounds [33]" in shown  # the recipe's value
    assert "--help GROUP" in lines[-1]
    assert "--help_all" in lines[-1]
    assert shown_help(capsys, "-h", recipes={}).count("\n") <= 60


@pytest.mark.parametrize("flags", [("--help", "lora"), ("--help=lora",)])
def test_help_of_a_group_has_its_flags_and_no_others(capsys, flags):
    shown = shown_help(capsys, *flags)
    assert all(f"--{item.name}" in shown for item in fields(LoRAOptions))
    others = {item.name for item in fields(RFTConfig)} - {item.name for item in fields(LoRAOptions)}
    assert not [name for name in others if f"--{name} " in shown]
    with pytest.raises(ConfigurationError, match=r"--help optimiser: no group.*did you mean optimizer\?"):
        parse_config(["--help", "optimiser"], {})


def test_all_help_is_grouped(capsys):
    shown = shown_help(capsys, "--help_all")
    assert all(f"{name} options" in shown for name in setting_groups())
    assert {"run", "optimizer", "algorithm", "rollout", "distribution", "evaluation", "data"} <= set(setting_groups())


def test_every_setting_says_what_it_is():
    for group in setting_groups().values():
        assert set(field_texts(group)) == {item.name for item in fields(group)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_rank": -1}, "lora_rank is -1"),
        ({"lora_alpha": 0.0}, r"lora_alpha is 0.0: give a number above 0"),
        ({"lora_targets": ()}, "lora_targets is empty"),
        ({"lora_targets": ("all-linear", "q_proj")}, r"lora_targets is \['all-linear', 'q_proj'\].*alone"),
        ({"lora_rank": 4, "freeze": ("model.layers",)}, r"freeze is \['model.layers'\] and lora_rank is 4"),
    ],
)
def test_adapter_settings_that_cannot_work_are_refused(changes, words):
    with pytest.raises(ConfigurationError, match=words):
        RFTConfig(**changes)


@pytest.mark.parametrize(("field", "value"), [("enable_engine_sleep", True), ("engine_type", "sglang")])
def test_weights_are_not_shared_with_an_engine_that_moves_them(field, value):
    with pytest.raises(ConfigurationError, match=f"share_engine_weights and {field}"):
        RFTConfig(share_engine_weights=True, **{field: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine_kv_gib": 0.0}, "engine_kv_gib is 0.0: give GiB above 0"),
        (
            {"engine_kv_gib": 2.0, "engine_type": "sglang"},
            "engine_type is sglang.*max_total_tokens",
        ),
        ({"engine_options": "{}"}, "engine_options is for vllm and sglang, and engine_type is hf"),
        (
            {"engine_options": "max_num_seqs=3", "engine_type": "vllm"},
            "engine_options is 'max_num_seqs=3' .*: give a JSON",
        ),
        ({"engine_options": "[3]", "engine_type": "vllm"}, r"engine_options is '\[3\]' \(\[3\]\): give a JSON"),
    ],
)
def test_arguments_of_the_engine_that_cannot_work_are_refused(changes, words):
    with pytest.raises(ConfigurationError, match=words):
        RFTConfig(**changes)


def test_the_engine_gets_its_room_and_its_own_arguments():
    config = RFTConfig(prompt_max_len=100, generate_max_len=50, eval_max_len=80, engine_kv_gib=1.5)
    engine = engine_config(config, "folder")
    assert (engine.max_model_len, engine.kv_cache_bytes, dict(engine.options)) == (180, 3 * 2**29, {})
    config = replace(config, eval_max_len=20, engine_type="vllm", engine_options='{"max_num_seqs": 512}')
    engine = engine_config(config, "folder")
    assert (engine.max_model_len, dict(engine.options)) == (150, {"max_num_seqs": 512})


def test_adapters_are_scaled_by_two_unless_alpha_is_given():
    assert RFTConfig(lora_rank=4).adapters(0).alpha == 8.0
    assert RFTConfig().adapters(0) is None
