"""A run on paper: a 72B on 64 GPUs from its config.json, by arithmetic that can be done by hand."""

import json
import sys

import pytest

from rft_trainer.config import RFTConfig
from rft_trainer.errors import ConfigurationError
from rft_trainer.memory.build import log_forecast
from rft_trainer.memory.dry_run import describe, make_plan
from rft_trainer.memory.forecast import GIB, Forecast
from rft_trainer.preflight import dry_run

QWEN_72B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
# Embedding and head, 80 blocks (q, k, v with biases, o, MLP, two norms), the last norm.
BLOCK = 8192 * 8192 + 8192 + 2 * (8192 * 1024 + 1024) + 8192 * 8192 + 3 * 8192 * 29568 + 2 * 8192
NUMEL = 2 * 152064 * 8192 + 80 * BLOCK + 8192


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(QWEN_72B))
    return str(made)


def settings(folder, **changes):
    base = {
        "pretrain": folder,
        "dataset": "x",
        "fsdp": True,
        "engine_type": "vllm",
        "engine_tp_size": 8,
        "rollout_batch_size": 128,
        "prompt_max_len": 1024,
        "generate_max_len": 3072,
        "init_kl_coef": 0.01,
        "enable_engine_sleep": True,
        "engine_mem_util": 0.6,
        "micro_train_batch_size": 1,
        "plan_ranks": 64,
        "plan_device_gib": 80,
        "dry_run": True,
    }
    return RFTConfig(**{**base, **changes})


def test_a_72b_on_64_gpus_by_hand(folder):
    plan = make_plan(settings(folder), ranks=64)
    update, generate = plan.forecast.phases["update"], plan.forecast.phases["generate"]
    # Every first dimension is a multiple of 64: shards are exact. fp32 masters, two moments, fp32 gradients.
    assert update["actor"] == pytest.approx(4 * NUMEL / 64, rel=1e-5)  # and the rotary table
    assert update["actor optimiser"] == pytest.approx(8 * NUMEL / 64, rel=1e-5)
    assert update["gradients"] == 4 * NUMEL // 64
    assert update["gathered weights"] == 2 * (2 * 152064 * 8192 + 8192 + 2 * BLOCK)
    assert generate["reference"] == update["actor"]
    assert generate["engine weights"] == 2 * NUMEL // 8
    assert generate["engine weights"] + generate["kv cache"] == int(0.6 * 80 * GIB)
    assert "engine weights" not in update  # it sleeps
    given = make_plan(settings(folder, engine_kv_gib=20.0), ranks=64)
    assert given.forecast.phases["generate"]["kv cache"] == 20 * GIB
    assert "--engine_kv_gib 100" in make_plan(settings(folder, engine_kv_gib=200.0), ranks=64).knobs
    assert plan.forecast.sync_bytes == 2 * NUMEL
    assert not plan.fits
    assert plan.forecast.peak_phase == "update"
    best = min(plan.knobs, key=lambda flag: plan.knobs[flag].peak)
    assert best == "--gradient_checkpointing"


def test_the_knob_that_it_names_makes_it_fit(folder):
    plan = make_plan(settings(folder, gradient_checkpointing=True), ranks=64)
    assert plan.fits
    text = describe(plan)
    assert "64 ranks: 8 engines of 8 ranks; FSDP2, bf16" in text
    assert "1024 responses a step, 16 a rank; 1 optimiser steps of 16 responses a rank, 16 micro-batches each" in text
    assert "fits" in text
    moved = make_plan(settings(folder, gradient_checkpointing=True, offload_trained=True), ranks=64)
    assert "actor" not in moved.forecast.phases["generate"]
    assert moved.forecast.peak < plan.forecast.peak
    assert moved.forecast.host_bytes > 12 * NUMEL / 64


def test_lora_needs_no_reference_and_hardly_an_optimiser(folder):
    plan = make_plan(settings(folder, lora_rank=16), ranks=64)
    assert "reference" not in plan.forecast.phases["generate"]
    assert plan.forecast.phases["update"]["actor"] < 2.1 * NUMEL / 64
    assert plan.forecast.phases["update"]["actor optimiser"] < 0.03 * 8 * NUMEL / 64


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_zero_stage_splits_what_it_says(folder, stage):
    update = make_plan(settings(folder, fsdp=False, zero_stage=stage), ranks=64).forecast.phases["update"]
    part = -(-NUMEL // 64)
    assert update["actor"] == pytest.approx(2 * (part if stage == 3 else NUMEL), rel=1e-5)
    # Parts are added up in fp32, whole gradients in the dtype of the computation.
    assert update["gradients"] == (4 * part if stage >= 2 else 2 * NUMEL)
    assert update["actor optimiser"] == 12 * (NUMEL if stage == 0 else part)


def test_whole_gradients_are_held_in_fp32_where_the_optimiser_of_stage_1_is_on_the_host(folder):
    stage = {"fsdp": False, "zero_stage": 1, "adam_offload": True}
    assert make_plan(settings(folder, **stage), ranks=64).forecast.phases["update"]["gradients"] == 4 * NUMEL


def test_a_dry_run_reports_every_problem_at_once_and_touches_nothing(folder, tmp_path):
    bad = settings(folder, plan_ranks=3, engine_tp_size=2, output_dir=tmp_path / "run")
    with pytest.raises(ConfigurationError) as caught:
        dry_run(bad)
    lines = str(caught.value).splitlines()
    assert any("3" in line and "2" in line for line in lines)
    assert any("rollout_batch_size is 128, which 3 ranks do not divide" in line for line in lines)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigurationError, match=r"no config.json can be read"):
        dry_run(settings(str(tmp_path)))
    assert "largest:" in dry_run(settings(folder))


def test_a_run_that_will_not_fit_is_warned_of_at_its_start(caplog):
    made = Forecast({"update": {"actor": 3 * GIB}, "sync": {"actor": GIB}}, 0, 0)
    log_forecast(made, 4 * GIB)
    assert not caplog.records
    log_forecast(made, 2 * GIB)
    assert "3.00 GiB in update, the largest phase, and the device has 2.00 GiB" in caplog.text


def test_a_knob_that_the_other_settings_or_a_missing_extra_forbid_is_not_advised(folder, monkeypatch):
    shared = settings(
        folder,
        share_engine_weights=True,
        enable_engine_sleep=False,
        precision="fp32",
        engine_tp_size=1,
        plan_ranks=1,
        zero_stage=2,
    )
    text = dry_run(shared)
    assert "with --micro_train_batch_size" not in text  # it is 1 already
    assert "with --gradient_checkpointing" in text
    for knob in ("--enable_engine_sleep", "--offload_trained", "--lora_rank"):
        assert f"with {knob}" not in text  # none of them goes with shared weights
    assert "with --lora_rank" in dry_run(settings(folder))
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "with --lora_rank" not in dry_run(settings(folder))
    averaged = settings(folder, fsdp=False, zero_stage=2, ema_decay=0.9)
    assert "with --fsdp" in dry_run(averaged)
    assert "with --zero_stage 3" not in dry_run(averaged)


SMALL = {**QWEN_72B, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
SMALL |= {"num_key_value_heads": 8, "vocab_size": 1024}
SMALL_NUMEL = 2 * 1024 * 512 + 2 * (4 * 512 * 512 + 3 * 512 + 3 * 512 * 1024 + 2 * 512) + 512


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    made = tmp_path_factory.mktemp("small")
    (made / "config.json").write_text(json.dumps(SMALL))
    return str(made)


def test_the_weight_average_and_the_replay_buffer_by_hand(small):
    plain = make_plan(settings(small), ranks=64).forecast
    assert "weight average" not in plain.phases["update"]
    assert "experiences" not in plain.phases["update"]
    kept = make_plan(settings(small, ema_decay=0.99, replay_on_device=True), ranks=64).forecast
    # Every phase holds the fp32 average of this rank's shards; all first dimensions are multiples of 64.
    assert {row["weight average"] for row in kept.phases.values()} == {4 * SMALL_NUMEL // 64}
    config = settings(small)
    # 1,024 responses over 64 ranks. A response token: id and version 8 each, mask 1, seven columns of 4; a prompt's: 8.
    expected = 16 * (8 * config.prompt_max_len + 45 * config.generate_max_len)
    assert kept.phases["update"]["experiences"] == expected
    assert "experiences" not in kept.phases["generate"]
    assert kept.total("update") == plain.total("update") + 4 * SMALL_NUMEL // 64 + expected
    # ZeRO below stage 3 averages whole weights on each rank.
    zero = make_plan(settings(small, fsdp=False, zero_stage=2, ema_decay=0.99), ranks=64).forecast
    assert zero.phases["generate"]["weight average"] == 4 * SMALL_NUMEL
    on_host = make_plan(settings(small, fsdp_cpu_offload=True, ema_decay=0.99), ranks=64).forecast
    assert "weight average" not in on_host.phases["update"]


def test_an_adapter_alone_is_what_an_update_sends(small):
    merged = make_plan(settings(small, lora_rank=16, lora_sync="merged"), ranks=64).forecast
    alone = make_plan(settings(small, lora_rank=16, lora_sync="adapter"), ranks=64).forecast
    assert merged.sync_bytes == 2 * SMALL_NUMEL
    # q, k, v, o; gate and up; down.
    factors = 2 * 16 * (4 * (512 + 512) + 2 * (512 + 1024) + (1024 + 512))
    assert alone.sync_bytes == 2 * factors
    # vLLM keeps its weights on the host while it sleeps.
    assert alone.host_bytes == merged.host_bytes + 2 * SMALL_NUMEL // 8
