"""The moving average of the actor: right numbers, evaluated and exported in its place, and kept over a resume."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rft_dist.testing import run_ranks
from rft_engines import EngineConfig
from rft_rewards import RewardComputationEngine, RewardRecipe, RewardSample
from rft_sync import source_for
from rft_trainer.config import RFTConfig
from rft_trainer.data import PromptDataset, RecordFields
from rft_trainer.errors import CheckpointError
from rft_trainer.models import Actor, load_causal_model, load_tokenizer
from rft_trainer.session import Ingredients, build_trainer
from rft_trainer.standalone import checkpointed_actor
from rft_trainer.strategy import get_strategy
from rft_trainer.testing import tiny_model_folder

DECAY = 0.5
NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def low_bytes(samples: Sequence[RewardSample]) -> list[float]:
    return [sum(i < 128 for i in s.response_ids) / max(1, len(s.response_ids)) for s in samples]


def config(folder, output, **changes):
    return RFTConfig(
        pretrain=folder,
        output_dir=Path(output),
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        generate_max_len=4,
        actor_learning_rate=1e-2,
        max_steps=2,
        ema_decay=DECAY,
        tensorboard=False,
        seed=5,
        **changes,
    )


def weight_of(module):
    source = source_for(module)
    with source.gather([NAME]) as tensors:
        return tensors[NAME].detach().clone()


def train(rank, world, settings):
    """(the weight before and after each step, what the engine held in each evaluation, the average at the end)."""
    tokenizer = load_tokenizer(settings.pretrain)
    records = [RecordFields(reference_key=None).record({"question": f"say {i}"}, f"made:{i}") for i in range(4)]
    prompts = PromptDataset(records, tokenizer, max_prompt_tokens=200)
    with get_strategy(settings).setup_distributed() as strategy:
        strategy.on_main(lambda: settings.output_dir.mkdir(parents=True, exist_ok=True))
        actor = strategy.prepare(Actor(load_causal_model(settings.pretrain)))
        runtime = strategy.create_engine(EngineConfig(model_path=settings.pretrain))
        trainer = build_trainer(
            settings,
            strategy,
            Ingredients(
                actor=actor,
                initial_model=None,
                tokenizer=tokenizer,
                prompts=prompts,
                held_out=prompts,
                rewards=RewardComputationEngine(RewardRecipe(functions=[low_bytes])),
            ),
        )
        weights, evaluated = [weight_of(actor.checkpoint_module)], []
        trainer.keep_rollouts = lambda step, rows: weights.append(weight_of(actor.checkpoint_module))
        evaluate = trainer.evaluator.maker.rollout

        def watching(items, prompts, sampling, **options):
            if sampling.greedy:
                evaluated.append(dict(runtime.engine.native.named_parameters())[NAME].detach().clone())
            return evaluate(items, prompts, sampling, **options)

        trainer.maker.rollout = watching
        trainer.fit()
        with trainer.averaged():
            average = weight_of(actor.checkpoint_module)
        after = weight_of(actor.checkpoint_module)
        engine = dict(runtime.engine.native.named_parameters())[NAME].detach().clone()
        assert trainer.memory.ledger.warnings == []  # nobody stays who should be away
        return weights, evaluated, average, after, engine, runtime.weights_version


def read(rank, world, plans):
    """The weight that evaluation and conversion of a checkpoint have, for several settings."""
    found = []
    for settings in plans:
        with get_strategy(settings).setup_distributed() as strategy:
            actor, step = checkpointed_actor(settings, strategy, settings.pretrain)
            found.append((weight_of(actor.checkpoint_module), step))
    return found


STAGED = {"offload_trained": True, "enable_engine_sleep": True}


@pytest.mark.parametrize(
    "strategy", [{"fsdp": True, **STAGED}, {"fsdp": False, "zero_stage": 2}], ids=["fsdp2", "zero2"]
)
def test_the_average_is_evaluated_and_the_weights_go_on(folder, tmp_path, strategy):
    settings = config(folder, tmp_path / "run", save_steps=1, **strategy)
    results = run_ranks(train, 2, settings, timeout_seconds=500)
    for weights, evaluated, average, after, engine, version in results:
        expected = weights[0]
        for number, weight in enumerate(weights):
            expected = DECAY * expected + (1 - DECAY) * weight
            if number in (0, 2):
                assert torch.allclose(evaluated[number // 2], expected, atol=1e-6)
        assert torch.allclose(average, expected, atol=1e-6)
        assert (average - weights[-1]).abs().max() > 1e-4
        assert torch.equal(after, weights[-1])
        assert torch.equal(engine, weights[-1])
        assert version == 3
    last = replace(settings, resume_from=tmp_path / "run" / "checkpoints" / "step_000002")
    plans = [last, replace(last, ema_decay=0.0)]
    for ((put, step), (plain, _)), (weights, _, average, *_) in zip(
        run_ranks(read, 2, plans, timeout_seconds=500), results, strict=True
    ):
        assert step == 2
        assert torch.equal(put, average)
        assert torch.equal(plain, weights[-1])
    with pytest.raises(CheckpointError, match="was written by 2 ranks and this run has 1"):
        run_ranks(read, 1, [last], timeout_seconds=500)
    saved = tmp_path / "run" / "checkpoints" / "step_000001"
    resumed = run_ranks(train, 2, config(folder, tmp_path / "run", resume_from=saved, **strategy), timeout_seconds=500)
    for got, reference in zip(resumed, results, strict=True):
        assert torch.equal(got[2], reference[2])
