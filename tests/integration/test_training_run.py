"""A whole training run does not depend on how it is spread, and a resumed one is the unbroken one."""

import json
import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch

from contracts.metrics_page import documented, undocumented
from integration.plain_training import config, stop_at, train, train_in_turn
from rft_dist.testing import run_ranks
from rft_trainer import convert
from rft_trainer.checkpoint import read_manifest
from rft_trainer.errors import CheckpointError, RunInterrupted
from rft_trainer.models import load_causal_model
from rft_trainer.strategy.checkpoint_engine import ShardFiles
from rft_trainer.testing import tiny_model_folder

SHAPE = {"max_steps": 4, "lr_scheduler": "linear", "init_kl_coef": 0.1, "max_epochs": 2, "save_steps": 2}
ZERO2 = {"fsdp": False, "zero_stage": 2}
SPREADS = {
    "micro-batches": {"micro_train_batch_size": 3},
    "shared prompts": {"micro_train_batch_size": 8, "share_prompts": True},
    "token budget": {"max_tokens_per_micro_batch": 80},
    "zero2": {**ZERO2, "micro_train_batch_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def run_in_turn(world, plans):
    """Results of each plan, by rank."""
    results = run_ranks(train_in_turn, world, plans, timeout_seconds=500)
    return [[of_rank[number] for of_rank in results] for number in range(len(plans))]


def assert_same(results, reference, *, exact=False):
    for version, weights, _ in results:
        assert version == reference[0][0]
        for name, tensor in reference[0][1].items():
            if exact:
                assert torch.equal(weights[name], tensor), name
            else:
                assert torch.allclose(weights[name], tensor, atol=5e-5), name
    assert sorted(t for r in results for t in r[2]) == sorted(t for r in reference for t in r[2])


def alone_and_converted(rank, world, settings, base):
    """A run, and one that begins at a checkpoint of the same weights, whose `pretrain` has others."""
    first = train(rank, world, settings)
    flags = ["--fsdp", "--device", "cpu", "--pretrain", base, "--from_model", settings.pretrain]
    flags += ["--seed", str(settings.seed), "--rollout_batch_size", "4", "--n_samples_per_prompt", "4"]
    flags += ["--actor_learning_rate", "1e-2", "--lr_warmup_steps", "4"]
    other = settings.output_dir.with_name("converted")
    assert convert.main([*flags, "--output_dir", str(other)]) == 0
    return first, train(rank, world, replace(settings, pretrain=base, output_dir=other, resume="auto"))


@pytest.fixture(scope="module")
def one_process(folder, tmp_path_factory):
    """One micro-batch for everything; the third step has a smaller batch (6 prompts, 4 at a time)."""
    place = tmp_path_factory.mktemp("one_process")
    base = str(tiny_model_folder(place / "base", seed=1))
    settings = config(folder, place / "run", micro_train_batch_size=64)
    return run_ranks(alone_and_converted, 1, settings, base, timeout_seconds=500)[0]


@pytest.fixture(scope="module")
def alone(one_process):
    return [one_process[0]]


@pytest.fixture(scope="module")
def two_processes(folder, tmp_path_factory):
    """Runs of two processes by name: (output folder, results)."""
    place = tmp_path_factory.mktemp("two_processes")
    plans = {name: config(folder, place / name, **changes) for name, changes in SPREADS.items()}
    plans["constant rate"] = config(folder, place / "constant rate", **{**SHAPE, "lr_scheduler": "constant"})
    results = run_in_turn(2, [(settings,) for settings in plans.values()])
    return {name: (place / name, result) for name, result in zip(plans, results, strict=True)}


@pytest.mark.parametrize("spread", SPREADS)
def test_the_result_is_that_of_one_process(alone, two_processes, spread):
    assert_same(two_processes[spread][1], alone)


def test_four_processes_under_zero_3_too(folder, alone, tmp_path):
    settings = config(folder, tmp_path / "run", fsdp=False, zero_stage=3, micro_train_batch_size=4)
    assert_same(run_ranks(train, 4, settings, timeout_seconds=500), alone)


def test_the_run_did_move_the_weights_and_the_reference_stays(folder, alone):
    before = load_causal_model(folder).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert (alone[0][1][name] - before[name]).abs().max() > 1e-3
    assert alone[0][0] == 4  # the first sync and one after each of three steps


def test_a_converted_model_begins_as_the_model_itself(one_process):
    """Bit by bit: weights, an optimiser that has not begun, the order of the data, sampled tokens and versions."""
    first, converted = one_process
    assert_same([converted], [first], exact=True)


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rows(run):
    """What the run logged, without what depends on the clock."""
    timed = ("perf/", "memory/", "sync/gigabytes")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in metrics(run)]


def rollouts(run):
    return {file.name: file.read_bytes() for file in sorted((run / "rollouts").iterdir())}


def leaves(value, place=""):
    """Tensors and plain numbers of a nested value, by place."""
    if isinstance(value, dict):
        return {k: v for key, entry in value.items() for k, v in leaves(entry, f"{place}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for key, entry in enumerate(value) for k, v in leaves(entry, f"{place}/{key}").items()}
    if isinstance(value, torch.Tensor):
        return {place: value.tolist()}
    return {place: value} if isinstance(value, int | float | str) else {}


def shards(folder):
    """Every tensor and number that a checkpoint of FSDP2 or DeepSpeed holds, the scheduler's included."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    files = ShardFiles([LossScaler, ZeroStageEnum, fragment_address])
    found = {file.name: file.read_bytes() for file in sorted((folder / "shards").rglob("*.distcp"))}
    for file in sorted((folder / "shards").rglob("*.pt")):
        found.update(leaves(files.load(str(file)), file.name))
    assert len(found) > 1
    return found


@pytest.fixture(scope="module")
def broken_and_whole(folder, tmp_path_factory):
    """Four steps, against two steps, a third that no checkpoint holds, a stop, and a resume, by strategy."""
    place, results = tmp_path_factory.mktemp("resumed"), {}
    for name, strategy in (("fsdp2", {"fsdp": True}), ("zero2", ZERO2)):
        whole, broken = (config(folder, place / name / kind, **SHAPE, **strategy) for kind in ("whole", "broken"))
        broken = replace(broken, save_in_background=True)
        results[name] = [(whole,), (broken, partial(stop_at, 4)), (replace(broken, resume="auto"),)]
    runs = run_in_turn(2, [plan for plans in results.values() for plan in plans])
    return {name: (place / name, runs[3 * i : 3 * i + 3]) for i, name in enumerate(results)}


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
def test_resume_is_bit_equal(broken_and_whole, strategy):
    place, (unbroken, stopped, resumed) = broken_and_whole[strategy]
    whole, broken = place / "whole", place / "broken"
    assert stopped == [None, None]
    assert_same(resumed, unbroken, exact=True)
    assert [row["step"] for row in rows(broken)] == [1, 2, 3, 4]
    assert rows(broken) == rows(whole)
    for row in metrics(whole):
        phases = {n: v for n, v in row.items() if n.startswith("perf/seconds_") and n != "perf/seconds_step"}
        assert sum(phases.values()) == pytest.approx(row["perf/seconds_step"], rel=1e-6)
        assert min(phases.values()) >= 0
        assert undocumented(set(row) - {"step"}) == []
        assert [m.name for m in documented() if m.when == "always" and not any(map(m.matches, row))] == []
    assert rollouts(broken) == rollouts(whole)
    assert len(rollouts(whole)) == 8
    # Optimiser and scheduler too: files of the last step, written in the background or not, hold the same.
    last = "checkpoints/step_000004"
    assert shards(broken / last) == shards(whole / last)
    states = [read_manifest(run / last) for run in (whole, broken)]
    assert states[0] == states[1]
    assert (states[0].weights_version, states[0].sampler["sampler"]["step_in_epoch"]) == (5, 0)


def resumed_alone(rank, world, settings, refused):
    """The result of a run, and why others do not begin."""
    result, reasons = train(rank, world, settings), []
    for other in refused:
        with pytest.raises(CheckpointError) as error:
            train(rank, world, other)
        reasons.append(str(error.value))
    return result, reasons


def test_another_number_of_ranks_continues_the_same_course_or_is_refused(folder, two_processes, tmp_path):
    whole, reference = two_processes["constant rate"]
    saved = whole / "checkpoints" / "step_000002"
    wide = config(folder, tmp_path / "wide", **{**SHAPE, "lr_scheduler": "constant"}, resume_from=saved)
    zero = two_processes["zero2"][0] / "checkpoints" / "step_000003"
    refused = [
        replace(wide, output_dir=tmp_path / "other", **ZERO2),
        config(folder, tmp_path / "one", **ZERO2, resume_from=zero),
        replace(wide, output_dir=tmp_path / "groups", n_samples_per_prompt=2, adam_betas=(0.8, 0.9)),
    ]
    ((result, reasons),) = run_ranks(resumed_alone, 1, wide, refused, timeout_seconds=500)
    assert_same([result], reference)
    assert [row["step"] for row in rows(tmp_path / "wide")] == [3, 4]
    for found, expected in zip(rows(tmp_path / "wide"), rows(whole)[2:], strict=True):
        assert found["rollout/reward"] == pytest.approx(expected["rollout/reward"])
    for reason, words in zip(
        reasons,
        (
            ("was written by fsdp2 and this run trains with deepspeed zero 2",),
            ("written by 2 ranks and this run has 1",),
            ("n_samples_per_prompt was 4 and is 2", "adam_betas was [0.9, 0.95] and is [0.8, 0.9]"),
        ),
        strict=True,
    ):
        assert all(word in reason for word in words), reason


def signalled(trainer, rank, step):
    if rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGINT)


def interrupted_then_resumed(rank, world, settings):
    usual = signal.getsignal(signal.SIGINT)
    with pytest.raises(RunInterrupted, match="after step 2"):
        train(rank, world, settings, signalled)
    assert signal.getsignal(signal.SIGINT) is usual
    return train(rank, world, replace(settings, resume="auto"))


def test_a_signal_on_one_rank_ends_all_after_the_step_with_a_checkpoint(folder, alone, tmp_path):
    results = run_ranks(interrupted_then_resumed, 2, config(folder, tmp_path / "run"), timeout_seconds=500)
    assert_same(results, alone)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
