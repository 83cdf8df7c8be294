"""A run on paper: a 72B on 64 GPUs from its config.json, by arithmetic that can be done by hand."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from rft_trainer.config import RFTConfig
from rft_trainer.errors import ConfigurationError
from rft_trainer.memory.build import announce_forecast, say_forecast
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
    # One block's gradients in bf16, once more in fp32 to be sent, and the head's, which wait for the end.
    assert update["gradients in flight"] == 6 * BLOCK + 2 * (152064 * 8192 + 8192)
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


WARM = {"warm_start_epochs": 2, "warm_start_batch_size": 128, "warm_start_micro_batch_size": 64}


def test_the_warm_start_of_a_72b_by_hand(folder):
    plain = make_plan(settings(folder), ranks=64)
    assert "warm_start" not in plain.forecast.phases
    assert "warm start:" not in describe(plain)
    plan = make_plan(settings(folder, **WARM), ranks=64)
    assert next(iter(plan.forecast.phases)) == "warm_start"
    row = plan.forecast.phases["warm_start"]
    update = plan.forecast.phases["update"]
    for owner in ("actor", "actor optimiser", "gradients", "gathered weights", "gradients in flight"):
        assert row[owner] == update[owner]
    # A rank has 2 of the 128 answers, fewer than the 64 of a micro-batch: 8,192 tokens in bf16, ten hidden-sized and
    # four intermediate-sized tensors a block, and two fp32 chunks of 1,024 rows of the vocabulary.
    tokens = 2 * (1024 + 3072)
    assert row["activations"] == 80 * 2 * tokens * (10 * 8192 + 4 * 29568) + 2 * 4 * 1024 * 152064
    assert len(row) == 6
    # No reference and no engine stand beside it, and still its activations are twice those of the update.
    assert plan.forecast.peak_phase == "warm_start"
    total = sum(row.values()) / GIB
    text = describe(plan)
    assert (
        f"warm start: 2 answers a rank and step, at most 8192 tokens a micro-batch; {total:.2f} GiB, does NOT" in text
    )
    assert "with --warm_start_micro_batch_size 1" in text


def test_a_budget_of_tokens_is_what_a_micro_batch_of_a_warm_start_has(small):
    def row(**changes):
        return make_plan(settings(small, **WARM, **changes), ranks=64).forecast.phases["warm_start"]["activations"]

    head = 2 * 4 * 1024 * 1024
    assert row() - head == 2 * 2 * 8192 * (10 * 512 + 4 * 1024)
    assert row(warm_start_max_tokens=6000) - head == 2 * 2 * 6000 * (10 * 512 + 4 * 1024)
    # Recomputed, the input of each of two blocks is kept, and one block at a time while it runs backward.
    block = 2 * 8192 * (10 * 512 + 4 * 1024)
    assert row(gradient_checkpointing=True) - head == 2 * 2 * 8192 * 512 + block
    # unless one answer is longer
    assert row(warm_start_max_tokens=10) - head == 2 * 2 * 4096 * (10 * 512 + 4 * 1024)


def test_a_warm_start_trains_whole_weights_where_reinforcement_trains_adapters(small):
    with_adapters = make_plan(settings(small, **WARM, lora_rank=16), ranks=64).forecast.phases
    without = make_plan(settings(small, **WARM), ranks=64).forecast.phases
    assert with_adapters["warm_start"] == without["warm_start"]
    assert with_adapters["update"]["actor optimiser"] < 0.3 * with_adapters["warm_start"]["actor optimiser"]


def test_gradients_outside_the_blocks_are_reduced_when_all_else_is_gone(small):
    """A vocabulary that outweighs everything: at the end its gradients stand alone, in bf16 and in fp32."""
    row = make_plan(
        settings(small, micro_train_batch_size=1, prompt_max_len=8, generate_max_len=8), ranks=64
    ).forecast.phases["update"]
    outside = 6 * (2 * 1024 * 512 + 512)
    block = 6 * (SMALL_NUMEL - 2 * 1024 * 512 - 512) // 2
    assert row["gradients in flight"] == max(
        block + 2 * (1024 * 512 + 512), outside - row["activations"] - row["gathered weights"]
    )


def test_the_buckets_of_zero_are_there_whatever_the_model(small):
    """DeepSpeed's buckets have 500 million elements; stage 3 keeps one for each optimiser, the others make theirs."""

    def rows(**changes):
        phases = make_plan(settings(small, fsdp=False, **changes), ranks=64).forecast.phases
        owners = ("gradients in flight", "reduce bucket")
        return [tuple(phases[phase].get(owner, 0) for owner in owners) for phase in ("generate", "update")]

    assert rows(zero_stage=0) == [(0, 0), (0, 0)]
    assert rows(zero_stage=2) == [(0, 0), (10**9, 0)]
    assert rows(zero_stage=1, zero_overlap=True) == [(0, 0), (2 * 10**9, 0)]
    assert rows(zero_stage=3) == [(0, 10**9), (0, 10**9)]
    assert rows(zero_stage=3, precision="fp32", advantage_estimator="gae") == [(0, 4 * 10**9), (0, 4 * 10**9)]


def test_micro_batches_are_no_larger_than_a_ranks_share(small):
    largest = [
        make_plan(settings(small, micro_train_batch_size=size, train_batch_size=128), ranks=64).forecast.phases[
            "update"
        ]
        for size in (2, 16)
    ]
    assert largest[0] == largest[1]


def test_below_the_lowest_trained_weight_no_activations_are_kept(small):
    fixed = settings(small, freeze=("model.embed_tokens", "model.layers.0."))
    rows = [make_plan(made, ranks=64).forecast.phases["update"] for made in (settings(small), fixed)]
    per_block = 2 * 4096 * (10 * 512 + 4 * 1024)
    assert rows[0]["activations"] - rows[1]["activations"] == per_block


def test_the_knob_that_it_names_makes_it_fit(folder):
    plan = make_plan(settings(folder, gradient_checkpointing=True), ranks=64)
    assert plan.fits
    text = describe(plan)
    assert "64 ranks: 8 engines of 8 ranks; FSDP2, bf16" in text
    assert "1024 responses a step, 16 a rank; 1 optimiser step of 16 responses a rank, 16 micro-batches of at" in text
    assert "of at most 4096 tokens\n" in text
    # 31 GiB beside the weights; a token is 80 layers of keys and values of one head of 128 in bf16 on each rank.
    assert plan.forecast.engine.kv_per_token == 2 * 80 * 128 * 2
    tokens = (int(0.6 * 80 * GIB) - 2 * NUMEL // 8) // 40960
    assert f"an engine gets 128 responses; its KV cache holds 128 of them at their longest at a time ({tokens}" in text
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
    said = []
    say_forecast(made, 4 * GIB, said.append)
    assert not caplog.records
    say_forecast(made, 2 * GIB, said.append)
    assert "3.00 GiB in update, the largest phase, and the device has 2.00 GiB" in caplog.text
    warm = Forecast({"warm_start": {"actor": 2 * GIB}, **made.phases}, 0, 0)
    say_forecast(warm, None, said.append)
    assert said == [
        "forecast for a rank: 3.00 GiB in update, the largest phase, of 4.00 GiB",
        "forecast for a rank: 3.00 GiB in update, the largest phase, and 2.00 GiB in warm_start",
    ]


def test_the_forecast_is_said_before_anything_is_loaded(small, caplog):
    """The folder holds a config.json and no weights."""
    strategy = SimpleNamespace(device=torch.device("cpu"), data=SimpleNamespace(size=64), bf16=False)
    said = []
    config = settings("a-name-of-the-app", **WARM)
    made = announce_forecast(config, strategy, small, warm_starts=True, say=said.append)
    assert made.phases["warm_start"]["actor"] == pytest.approx(4 * SMALL_NUMEL / 64, rel=1e-2)
    assert len(said) == 1
    assert "warm_start" in said[0]
    behind = announce_forecast(config, strategy, small, warm_starts=False, say=said.append)
    assert "warm_start" not in behind.phases
    assert announce_forecast(config, strategy, "no folder", warm_starts=False, say=said.append) is None
    assert len(said) == 2
    assert "no forecast" in caplog.text


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


def test_flags_that_fit_only_together_are_named_together(small):
    # Micro-batches of 64 responses of 4,096 tokens keep 9 GiB, and an engine that stays awake has 8.5 of 10 GiB.
    tight = {"plan_ranks": 1, "engine_tp_size": 1, "micro_train_batch_size": 64, "enable_engine_sleep": False}
    plan = make_plan(settings(small, **tight, plan_device_gib=10, engine_mem_util=0.85), ranks=1)
    assert not plan.leaves_room(plan.forecast)
    assert not any(plan.leaves_room(made) for made in plan.knobs.values())
    flags, made = plan.together
    assert len(flags) > 1
    assert not any(flag.startswith("--lora_rank") for flag in flags)
    assert plan.leaves_room(made)
    assert f"with {' '.join(flags)}: {made.peak / GIB:.2f} GiB in {made.peak_phase}, fits" in describe(plan)
    # One flag is enough where the engine takes less, and then no others are named beside it.
    roomy = make_plan(settings(small, **tight, plan_device_gib=10, engine_mem_util=0.3), ranks=1)
    assert not roomy.leaves_room(roomy.forecast)
    assert roomy.together is None


def test_a_share_that_holds_no_cache_is_no_share(small):
    # On one rank a longest response has 4,096 tokens of keys and values of two layers, 512 wide, in bf16.
    need, weights = 4096 * 2 * 2 * 512 * 2, 2 * SMALL_NUMEL
    share = weights + need // 2
    plan = make_plan(
        settings(small, engine_tp_size=1, engine_mem_util=share / (10 * GIB), plan_device_gib=10), ranks=64
    )
    assert plan.forecast.engine.kv_cache == pytest.approx(need // 2, abs=1)
    assert plan.leaves_room(plan.forecast)
    assert not plan.fits
    text = describe(plan)
    assert "the engine does NOT start: engine_mem_util 0.0" in text
    assert f"one response of 4096 tokens needs {need / GIB:.2f} GiB" in text
    given = make_plan(settings(small, engine_tp_size=1, engine_kv_gib=need / 2 / GIB), ranks=64)
    assert "the engine does NOT start: engine_kv_gib is" in describe(given)
    # Half of a share that is just enough is no advice.
    enough = (weights + need) / (10 * GIB) * 1.5
    advised = make_plan(settings(small, engine_tp_size=1, engine_mem_util=enough, plan_device_gib=10), ranks=64)
    assert advised.fits
    assert not any("--engine_mem_util" in flag for flag in advised.knobs)


def test_more_ranks_than_heads_hold_heads_twice(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "num_key_value_heads": 2}))
    per_token = [
        make_plan(settings(str(tmp_path), engine_tp_size=size), ranks=64).forecast.engine.kv_per_token
        for size in (1, 2, 8)
    ]
    head = 2 * 2 * 64 * 2  # keys and values of two layers, 64 wide, in bf16
    assert per_token == [2 * head, head, head]


def test_phases_that_a_run_has_not_are_not_shown(small):
    def columns(**changes):
        return describe(make_plan(settings(small, **changes), ranks=64)).partition("\nGiB a rank")[2].partition("\n")[0]

    assert {"reference", "evaluate", "teacher", "critic_values"}.isdisjoint(columns(init_kl_coef=0.0).split())
    assert {"reference", "evaluate"} <= set(columns(eval_dataset="x", lora_rank=4).split())
    assert "evaluate" in make_plan(settings(small), ranks=64).forecast.phases  # a program may bring a set of its own


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, "num_attention_heads 12"),
        ({"intermediate_size": 1028}, "intermediate_size 1028"),
        ({"num_attention_heads": 24, "hidden_size": 1536, "num_key_value_heads": 3}, "num_key_value_heads 3"),
    ],
)
def test_a_model_that_the_engine_s_ranks_cannot_share_is_refused_on_paper(tmp_path, change, words):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **change}))
    with pytest.raises(ConfigurationError, match=f"engine_tp_size 8 and {words}"):
        dry_run(settings(str(tmp_path)))
    assert "largest:" in dry_run(settings(str(tmp_path), engine_tp_size=1))


def test_an_adapter_alone_is_what_an_update_sends(small):
    merged = make_plan(settings(small, lora_rank=16, lora_sync="merged"), ranks=64).forecast
    alone = make_plan(settings(small, lora_rank=16, lora_sync="adapter"), ranks=64).forecast
    assert merged.sync_bytes == 2 * SMALL_NUMEL
    # q, k, v, o; gate and up; down.
    factors = 2 * 16 * (4 * (512 + 512) + 2 * (512 + 1024) + (1024 + 512))
    assert alone.sync_bytes == 2 * factors
    # vLLM keeps its weights on the host while it sleeps.
    assert alone.host_bytes == merged.host_bytes + 2 * SMALL_NUMEL // 8
