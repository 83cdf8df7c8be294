"""One configuration: every problem at once, every value named."""

from dataclasses import fields

import pytest

from rft_trainer.cli import parse_config
from rft_trainer.config import RFTConfig
from rft_trainer.errors import ConfigurationError


def test_all_problems_come_at_once_with_value_and_remedy():
    with pytest.raises(ConfigurationError) as caught:
        RFTConfig(max_steps=0, top_p=1.5, n_samples_per_prompt=0, input_template="no place", lr_scheduler="steps")
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    for words in (
        ("max_steps", "0"),
        ("top_p", "1.5"),
        ("n_samples_per_prompt", "0"),
        ("input_template", "{}"),
        ("steps",),
    ):
        assert any(all(word in line for word in words) for line in lines), words


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
        parse_config(["--help"], recipes)
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


def test_adapters_are_scaled_by_two_unless_alpha_is_given():
    assert RFTConfig(lora_rank=4).adapters(0).alpha == 8.0
    assert RFTConfig().adapters(0) is None
