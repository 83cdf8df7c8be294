"""A whole training run does not depend on how it is spread, and a resumed one is the unbroken one."""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from contracts.metrics_page import documented, undocumented
from rft_dist.testing import run_ranks
from rft_engines import EngineConfig
from rft_rewards import RewardComputationEngine, RewardRecipe, RewardSample
from rft_sync import source_for
from rft_trainer.checkpoint import read_manifest, resolve_resume
from rft_trainer.config import RFTConfig
from rft_trainer.data import PromptDataset, RecordFields
from rft_trainer.errors import CheckpointError, RunInterrupted
from rft_trainer.models import Actor, load_causal_model, load_tokenizer
from rft_trainer.session import Ingredients, build_trainer
from rft_trainer.strategy import get_strategy
from rft_trainer.strategy.checkpoint_engine import ShardFiles
from rft_trainer.testing import tiny_model_folder

PROMPTS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def low_bytes(samples: Sequence[RewardSample]) -> list[float]:
    """A reward that a random byte model can move: the share of token ids below 128."""
    return [sum(i < 128 for i in s.response_ids) / max(1, len(s.response_ids)) for s in samples]


def config(folder, output, **changes):
    base = RFTConfig(
        pretrain=folder,
        fsdp=True,
        output_dir=Path(output),
        rollout_batch_size=4,
        n_samples_per_prompt=4,
        generate_max_len=6,
        actor_learning_rate=1e-2,
        max_steps=3,
        lr_warmup_steps=4,
        tensorboard=False,
        seed=5,
    )
    return replace(base, **changes)


class StopError(Exception):
    """Stands for whatever ends a run between two checkpoints."""


def train(rank, world, settings, stop_at=None, interrupted=None):
    """Run the trainer to its end; (weights version, full weights, texts of the last rollout)."""
    tokenizer = load_tokenizer(settings.pretrain)
    fields = RecordFields(reference_key=None)
    records = [fields.record({"question": f"say {i}"}, f"made:{i}") for i in range(PROMPTS)]
    prompts = PromptDataset(records, tokenizer, max_prompt_tokens=200)
    with get_strategy(settings).setup_distributed() as strategy:
        strategy.on_main(lambda: settings.output_dir.mkdir(parents=True, exist_ok=True))
        actor = strategy.prepare(Actor(load_causal_model(settings.pretrain)))
        initial = None
        if settings.init_kl_coef > 0:
            initial = strategy.prepare_frozen(Actor(load_causal_model(settings.pretrain)))
        strategy.create_engine(EngineConfig(model_path=settings.pretrain))
        rewards = RewardComputationEngine(RewardRecipe(functions=[low_bytes]))
        ingredients = Ingredients(
            actor=actor, initial_model=initial, tokenizer=tokenizer, prompts=prompts, held_out=(), rewards=rewards
        )
        trainer = build_trainer(resolve_resume(settings), strategy, ingredients)
        texts = []
        keep = trainer.keep_rollouts

        def watch(step, experiences):
            if step == stop_at:
                raise StopError
            if step == settings.max_steps - 1 and rank == interrupted:
                os.kill(os.getpid(), signal.SIGINT)
            keep(step, experiences)
            texts.append([(e.group, e.response) for e in experiences])

        trainer.keep_rollouts = watch
        try:
            trainer.fit()
        except StopError:
            return None
        source = source_for(actor.checkpoint_module)
        names = [meta.name for meta in source.metadata()]
        with source.gather(names) as tensors:
            weights = {name: tensors[name].detach().clone() for name in names}
        return trainer.runtime.weights_version, weights, texts[-1]


def train_in_turn(rank, world, plans):
    """Several runs by the same processes, which is most of a run's price."""
    return [train(rank, world, settings, stop_at) for settings, stop_at in plans]


def run(world, settings):
    return run_ranks(train, world, settings, timeout_seconds=500)


def assert_same(results, reference, *, exact=False):
    for version, weights, _ in results:
        assert version == reference[0][0]
        for name, tensor in reference[0][1].items():
            if exact:
                assert torch.equal(weights[name], tensor), name
            else:
                assert torch.allclose(weights[name], tensor, atol=5e-5), name
    assert sorted(t for r in results for t in r[2]) == sorted(t for r in reference for t in r[2])


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """One process, one micro-batch for everything; the third step has a smaller batch (6 prompts, 4 at a time)."""
    return run(1, config(folder, tmp_path_factory.mktemp("alone"), micro_train_batch_size=64))


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, {"micro_train_batch_size": 3}),
        (2, {"micro_train_batch_size": 8, "share_prompts": True}),
        (2, {"max_tokens_per_micro_batch": 80}),
        (2, {"fsdp": False, "zero_stage": 2, "micro_train_batch_size": 2}),
        (4, {"fsdp": False, "zero_stage": 3, "micro_train_batch_size": 4}),
    ],
)
def test_the_result_is_that_of_one_process(folder, alone, tmp_path, world, changes):
    assert_same(run(world, config(folder, tmp_path / "run", **changes)), alone)


def test_the_run_did_move_the_weights_and_the_reference_stays(folder, alone):
    before = load_causal_model(folder).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert (alone[0][1][name] - before[name]).abs().max() > 1e-3
    assert alone[0][0] == 4  # the first sync and one after each of three steps


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


SHAPE = {"max_steps": 4, "lr_scheduler": "linear", "init_kl_coef": 0.1, "max_epochs": 2, "save_steps": 2}


@pytest.mark.parametrize("strategy", [{"fsdp": True}, {"fsdp": False, "zero_stage": 2}], ids=["fsdp2", "zero2"])
def test_resume_is_bit_equal(folder, tmp_path, strategy):
    """Four steps, against two steps, a third that no checkpoint holds, a stop, and a resume: all is the same."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    background = {"save_in_background": True}
    plans = [
        (config(folder, whole, **SHAPE, **strategy), None),
        (config(folder, broken, **SHAPE, **strategy, **background), 4),
        (config(folder, broken, **SHAPE, **strategy, **background, resume="auto"), None),
    ]
    results = run_ranks(train_in_turn, 2, plans, timeout_seconds=500)
    assert_same([r[2] for r in results], [r[0] for r in results], exact=True)
    assert [row["step"] for row in rows(broken)] == [1, 2, 3, 4]
    assert rows(broken) == rows(whole)
    for row in metrics(whole):
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


def test_another_number_of_ranks_continues_the_same_course(folder, tmp_path):
    whole, wide = tmp_path / "whole", tmp_path / "wide"
    shape = {**SHAPE, "lr_scheduler": "constant"}
    reference = run(2, config(folder, whole, **shape))
    saved = whole / "checkpoints" / "step_000002"
    assert_same(run(1, config(folder, wide, **shape, resume_from=saved)), reference)
    assert [row["step"] for row in rows(wide)] == [3, 4]
    for found, expected in zip(rows(wide), rows(whole)[2:], strict=True):
        assert found["rollout/reward"] == pytest.approx(expected["rollout/reward"])
    with pytest.raises(CheckpointError, match=r"was written by fsdp2 and this run trains with deepspeed zero 2"):
        run(1, config(folder, tmp_path / "other", **shape, fsdp=False, resume_from=saved))


def interrupted_then_resumed(rank, world, settings):
    usual = signal.getsignal(signal.SIGINT)
    with pytest.raises(RunInterrupted, match="after step 2"):
        train(rank, world, settings, interrupted=1)
    assert signal.getsignal(signal.SIGINT) is usual
    return train(rank, world, replace(settings, resume="auto"))


def test_a_signal_on_one_rank_ends_all_after_the_step_with_a_checkpoint(folder, alone, tmp_path):
    results = run_ranks(interrupted_then_resumed, 2, config(folder, tmp_path / "run"), timeout_seconds=500)
    assert_same(results, alone)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


def test_deepspeed_names_the_numbers_of_ranks(folder, tmp_path):
    shape = {"max_steps": 1, "fsdp": False}
    run(2, config(folder, tmp_path / "two", **shape))
    saved = tmp_path / "two" / "checkpoints" / "step_000001"
    with pytest.raises(CheckpointError, match="written by 2 ranks and this run has 1"):
        run(1, config(folder, tmp_path / "one", **shape, resume_from=saved))
