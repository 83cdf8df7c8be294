"""A whole training run does not depend on how it is spread, and a resumed one is the unbroken one."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rft_dist.testing import run_ranks
from rft_engines import EngineConfig
from rft_rewards import RewardComputationEngine, RewardRecipe, RewardSample
from rft_sync import source_for
from rft_trainer.checkpoint import read_manifest
from rft_trainer.config import RFTConfig
from rft_trainer.data import PromptDataset, RecordFields
from rft_trainer.errors import CheckpointError
from rft_trainer.models import Actor, load_causal_model, load_tokenizer
from rft_trainer.session import Ingredients, build_trainer
from rft_trainer.strategy import get_strategy
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


def train(rank, world, settings):
    """Run the trainer to its end; (metrics of the last step, full weights, texts of the last rollout)."""
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
        trainer = build_trainer(
            settings,
            strategy,
            Ingredients(
                actor=actor,
                initial_model=initial,
                tokenizer=tokenizer,
                prompts=prompts,
                held_out=(),
                rewards=rewards,
            ),
        )
        texts = []
        trainer.keep_rollouts = lambda step, experiences: texts.append([(e.group, e.response) for e in experiences])
        trainer.fit()
        source = source_for(actor.checkpoint_module)
        names = [meta.name for meta in source.metadata()]
        with source.gather(names) as tensors:
            weights = {name: tensors[name].detach().clone() for name in names}
        return trainer.runtime.weights_version, weights, texts[-1]


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


@pytest.mark.parametrize("strategy", [{"fsdp": True}, {"fsdp": False, "zero_stage": 2}], ids=["fsdp2", "zero2"])
def test_resume_is_bit_equal(folder, tmp_path, strategy):
    shape = {"max_steps": 4, "lr_scheduler": "linear", "init_kl_coef": 0.1, "max_epochs": 2, **strategy}
    unbroken = run(2, config(folder, tmp_path / "a", **shape))
    run(2, config(folder, tmp_path / "b", **shape, save_steps=2))
    saved = tmp_path / "b" / "checkpoints" / "step_000002"
    assert read_manifest(saved).weights_version == 3
    resumed = run(2, config(folder, tmp_path / "b", **shape, resume_from=saved))
    assert_same(resumed, unbroken, exact=True)
    with pytest.raises(CheckpointError, match="written by 2 ranks and this run has 1"):
        run(1, config(folder, tmp_path / "c", **shape, resume_from=saved))
    other = {"fsdp": not strategy["fsdp"], "zero_stage": 1}
    with pytest.raises(CheckpointError, match=r"was written by .* and this run trains with"):
        run(2, config(folder, tmp_path / "e", **{**shape, **other}, resume_from=saved))
    shard = next(file for file in (saved / "shards").rglob("*") if file.is_file())
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=re.escape(shard.name)):
        run(2, config(folder, tmp_path / "d", **shape, resume_from=saved))
