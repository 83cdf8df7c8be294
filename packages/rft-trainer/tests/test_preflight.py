"""What one rank can find out alone, before any process talks to another."""

from pathlib import Path

import pytest

from rft_dist import TorchrunEnvironment
from rft_trainer.config import RFTConfig
from rft_trainer.errors import ConfigurationError
from rft_trainer.preflight import RUN_MARKER, claim_output, preflight, with_further_problems
from rft_trainer.testing import tiny_model_folder


@pytest.fixture
def good(tmp_path):
    folder = tiny_model_folder(tmp_path / "model")
    return {"pretrain": str(folder), "dataset": "x.jsonl", "fsdp": True, "output_dir": tmp_path / "run"}


def world(size):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return TorchrunEnvironment.from_environ({**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})


def test_a_good_configuration_passes(good):
    preflight(RFTConfig(**good), world(2))


@pytest.mark.parametrize(
    ("change", "size", "words"),
    [
        ({"engine_tp_size": 3}, 2, ("3", "2")),
        ({"engine_tp_size": 2}, 2, ("engine_tp_size 2", "'hf'")),
        ({"policy_loss": "reinforce", "eps_clip": 0.1}, 1, ("'reinforce'", "clip_low")),
        ({"rollout_batch_size": 3}, 2, ("rollout_batch_size is 3", "multiple of 2")),
        ({"train_batch_size": 1}, 2, ("train_batch_size is 1", "multiple of 2")),
        ({"n_samples_per_prompt": 1}, 1, ("group_norm", "n_samples_per_prompt must be >= 2, got 1")),
        ({"advantage_estimator": "grpoo"}, 1, ("grpoo", "group_norm")),
        ({"advantage_estimator": "on_policy_distillation"}, 1, ("on_policy_distillation", "teacher_log_probs")),
        ({"teacher": "x"}, 1, ("teacher 'x'", "'group_norm'")),
        ({"critic_warmup_steps": 2}, 1, ("critic_warmup_steps 2", "'group_norm'")),
        ({"advantage_estimator": "rloo", "advantage_std": "population"}, 1, ("advantage_std 'population'", "'rloo'")),
        ({"temperature": 0.0}, 1, ("temperature 0", "n_samples_per_prompt 8")),
        ({"engine_type": "sglang", "top_p": 0.9}, 1, ("top_p 0.9", "'sglang'")),
        ({"engine_type": "vllm", "first_token_temperature": 2.0}, 1, ("first_token_temperature 2.0", "'vllm'")),
        ({"ema_decay": 0.9, "fsdp": False, "zero_stage": 3}, 1, ("ema_decay 0.9", "ZeRO stage 3")),
        ({"gae_lambda": 0.5}, 1, ("gae_lambda 0.5", "'group_norm'")),
        ({"policy_loss": "pppo"}, 1, ("pppo", "ppo")),
        ({"kl_estimator": "k4"}, 1, ("k4", "k3")),
        ({"engine_type": "sglang"}, 1, ("SGLang", "--extra sglang")),
        ({"share_engine_weights": True}, 2, ("share_engine_weights", "2 ranks")),
        (
            {"share_engine_weights": True, "fsdp": False, "precision": "bf16"},
            1,
            ("share_engine_weights", "DeepSpeed", "fp32 masters"),
        ),
        ({"adam_offload": True, "fsdp": False, "zero_stage": 0}, 1, ("adam_offload", "ZeRO stage 0")),
        ({"zero_hpz_size": 2}, 2, ("zero_hpz_size 2", "FSDP2")),
        ({"zero_overlap": True}, 2, ("zero_overlap True", "FSDP2")),
        ({"zero_hpz_size": 2, "fsdp": False, "zero_stage": 2}, 2, ("zero_hpz_size 2", "ZeRO stage 2")),
        ({"zero_hpz_size": 2, "fsdp": False, "zero_stage": 3}, 3, ("zero_hpz_size is 2", "3 ranks")),
        ({"fsdp_shard_size": 2}, 3, ("fsdp_shard_size is 2", "3 ranks")),
        ({"fsdp_reshard": False, "fsdp": False}, 1, ("fsdp_reshard False", "DeepSpeed")),
        ({"fsdp_cpu_offload": True, "fsdp": False}, 1, ("fsdp_cpu_offload True", "DeepSpeed")),
        ({"fsdp_cpu_offload": True, "adam_offload": True}, 1, ("fsdp_cpu_offload", "adam_offload")),
        ({"lora_rank": 4, "lora_sync": "adapter", "engine_type": "sglang"}, 1, ("'sglang'", "'lora_adapter'")),
        ({"lora_rank": 600, "lora_sync": "adapter", "engine_type": "vllm"}, 1, ("lora_rank 600", "'vllm'")),
        ({"resume_from": Path("/no/checkpoint")}, 1, ("/no/checkpoint", "manifest.json")),
        ({"pretrain": None}, 1, ("pretrain is not set",)),
        ({"pretrain": "/no/such/folder"}, 1, ("/no/such/folder", "no such folder")),
        ({"output_dir": Path("/proc/nothing/here")}, 1, ("/proc", "cannot be written")),
    ],
)
def test_each_problem_is_named(good, change, size, words):
    with pytest.raises(ConfigurationError) as caught:
        preflight(RFTConfig(**{**good, **change}), world(size))
    for word in words:
        assert word in str(caught.value)


def test_a_group_of_one_hides_no_other_problem_of_the_estimator(good):
    wrong = {**good, "advantage_estimator": "grpo", "n_samples_per_prompt": 1, "teacher": "/x", "gae_lambda": 0.5}
    with pytest.raises(ConfigurationError) as caught:
        preflight(RFTConfig(**wrong), world(1))
    for words in ("n_samples_per_prompt must be >= 2", "teacher '/x' and", "gae_lambda 0.5 and"):
        assert words in str(caught.value)


def test_a_model_that_the_engines_ranks_cannot_share_is_refused_before_it_is_loaded(good, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 60, "num_attention_heads": 3}')
    with pytest.raises(ConfigurationError, match="engine_tp_size 2 and num_attention_heads 3"):
        preflight(
            RFTConfig(**{**good, "pretrain": str(tmp_path), "engine_type": "vllm", "engine_tp_size": 2}), world(2)
        )


def test_all_problems_at_once(good):
    config = RFTConfig(**{**good, "policy_loss": "pppo", "rollout_batch_size": 3, "pretrain": "/no/such/folder"})
    with pytest.raises(ConfigurationError) as caught:
        preflight(config, world(2))
    assert len(str(caught.value).splitlines()) == 3


def test_each_check_gives_all_of_its_problems(good, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = RFTConfig(
        **{**good, "pretrain": None, "dataset": None, "fsdp": False, "zero_stage": 2},
        engine_type="sglang",
        rollout_batch_size=3,
        train_batch_size=3,
        top_p=0.9,
        temperature=0.0,
        fsdp_shard_size=3,
        fsdp_reshard=False,
        critic_pretrain="x",
        gae_lambda=0.5,
    )
    with pytest.raises(ConfigurationError) as caught:
        preflight(config, world(2))
    beginnings = [line.split(":")[0].split(" and ")[0] for line in str(caught.value).splitlines()]
    assert sorted(beginnings) == sorted(
        [
            "rollout_batch_size is 3, which 2 ranks do not divide",
            "train_batch_size is 3, which 2 ranks do not divide",
            "critic_pretrain 'x'",
            "gae_lambda 0.5",
            "top_p 0.9, top_k 0",
            "temperature 0",
            "pretrain is not set",
            "dataset is not set",
            "fsdp_shard_size 3",
            "fsdp_reshard False",
            "fsdp_shard_size is 3, which does not divide 2 ranks",
            "DeepSpeed training needs the extra 'deepspeed'",
            "the SGLang engine needs the extra 'sglang'",
            "TensorBoard logging needs the extra 'tensorboard'",
        ]
    )


def test_settings_that_cannot_be_made_hide_no_other_problem(good, monkeypatch):
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": 29500,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    wrong = {"top_p": 2.0, "lora_alpha": -1.0, "rollout_batch_size": 3, "policy_loss": "pppo", "pretrain": "/no/such"}
    with pytest.raises(ConfigurationError) as made:
        RFTConfig(**{**good, **wrong})
    assert len(str(made.value).splitlines()) == 2
    lines = str(with_further_problems(made.value)).splitlines()
    assert lines[:2] == str(made.value).splitlines()
    assert ["rollout_batch_size is 3" in lines[2], "pppo" in lines[3], "/no/such" in lines[4]] == [True] * 3
    assert len(lines) == 5
    # A value that makes a check stumble is reported once, and the checks behind it still run.
    with pytest.raises(ConfigurationError) as made:
        RFTConfig(**{**good, "fsdp_shard_size": 0, "max_steps": 0, "kl_estimator": "k9"})
    text = str(with_further_problems(made.value))
    assert text.count("fsdp_shard_size") == 1
    assert "k9" in text
    # Without a launcher that is said, too; an error of another kind stays what it is.
    monkeypatch.delenv("WORLD_SIZE")
    assert "WORLD_SIZE" in str(with_further_problems(made.value))
    other = OSError("no space")
    assert with_further_problems(other) is other


def test_an_earlier_run_is_never_overwritten_unasked(good):
    config = RFTConfig(**good)
    claim_output(config)
    (config.output_dir / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigurationError, match="already holds a run"):
        preflight(config, world(1))
    claim_output(RFTConfig(**good, overwrite=True))
    assert [file.name for file in config.output_dir.iterdir()] == [RUN_MARKER]


def test_a_warm_start_is_checked_against_the_ranks_and_the_resume(good, tmp_path):
    config = RFTConfig(**good, warm_start_epochs=1, warm_start_batch_size=3, resume_from=tmp_path / "other/step_1")
    with pytest.raises(ConfigurationError) as caught:
        preflight(config, world(2))
    assert "warm_start_batch_size is 3, which 2 ranks do not divide" in str(caught.value)
    with pytest.raises(ConfigurationError, match="and a warm start do not work together"):
        preflight(RFTConfig(**good, warm_start_epochs=1, resume_from=tmp_path / "other/step_1"), world(2))


def test_a_folder_that_is_no_run_is_never_deleted(good):
    config = RFTConfig(**good, overwrite=True)
    config.output_dir.mkdir()
    (config.output_dir / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigurationError, match="no run wrote"):
        claim_output(config)
    assert (config.output_dir / "thesis.txt").exists()
