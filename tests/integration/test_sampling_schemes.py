"""Sampling schemes in whole runs: dynamic sampling, partial rollouts and a first token at its own temperature."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from integration.kept_metrics import KeptMetrics
from integration.made_prompts import made_prompts, whole_weights
from rft_dist.testing import run_ranks
from rft_engines import EngineConfig
from rft_rewards import RewardComputationEngine, RewardRecipe, RewardSample
from rft_sync import BroadcastManager
from rft_trainer.config import RFTConfig
from rft_trainer.models import Actor, load_causal_model, load_tokenizer
from rft_trainer.roles import scoring_options
from rft_trainer.session import Ingredients, build_trainer
from rft_trainer.strategy import get_strategy
from rft_trainer.testing import tiny_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def first_is_low(samples: Sequence[RewardSample]) -> list[float]:
    """Right or wrong by the first token: some groups are all right or all wrong."""
    return [float(bool(s.response_ids) and s.response_ids[0] < 128) for s in samples]


def config(folder, output, **changes):
    base = RFTConfig(
        pretrain=folder,
        fsdp=True,
        output_dir=Path(output),
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        generate_max_len=8,
        actor_learning_rate=1e-2,
        max_steps=3,
        gap_warn=None,
        tensorboard=False,
        seed=5,
    )
    return replace(base, **changes)


def train(rank, world, settings):
    """(metrics of each step, (group, ids, versions) of what each step trained on, weights)."""
    tokenizer = load_tokenizer(settings.pretrain)
    prompts = made_prompts(tokenizer, 24)
    with get_strategy(settings).setup_distributed() as strategy:
        strategy.on_main(lambda: settings.output_dir.mkdir(parents=True, exist_ok=True))
        actor = strategy.prepare(Actor(load_causal_model(settings.pretrain), **scoring_options(settings)))
        strategy.create_engine(EngineConfig(model_path=settings.pretrain))
        rewards = RewardComputationEngine(RewardRecipe(functions=[first_is_low]))
        trainer = build_trainer(
            settings,
            strategy,
            Ingredients(
                actor=actor, initial_model=None, tokenizer=tokenizer, prompts=prompts, held_out=(), rewards=rewards
            ),
        )
        steps = []
        trainer.keep_rollouts = lambda step, rows: steps.append(
            [(e.group, tuple(e.response_ids.tolist()), tuple(e.token_versions.tolist())) for e in rows]
        )
        trainer.logger = kept = KeptMetrics()
        trainer.fit()
        return kept.steps, steps, whole_weights(actor.network)


def in_turn(rank, world, plans):
    """Several runs by the same processes."""
    return [train(rank, world, settings) for settings in plans]


def run(world, *plans):
    """Results of each plan, by rank."""
    results = run_ranks(in_turn, world, plans, timeout_seconds=500)
    return [[of_rank[number] for of_rank in results] for number in range(len(plans))]


def trained(results, step):
    return [row for result in results for row in result[1][step]]


def train_and_count_syncs(rank, world, settings):
    """(number of times that the engine got its weights, what `train` gives)."""
    syncs, broadcast = [], BroadcastManager.broadcast_to_engine

    def counted(manager, version=None):
        syncs.append(version)
        return broadcast(manager, version)

    BroadcastManager.broadcast_to_engine = counted
    results = train(rank, world, settings)
    return len(syncs), results


def test_dynamic_sampling_fills_the_batch_alike_on_one_and_two_ranks(folder, tmp_path):
    """The one rank's engine sleeps while the actor learns, and gets its weights once a step, whatever the rounds."""
    changes = {"dynamic_sampling": True}
    sleeping = config(folder, tmp_path / "one", **changes, enable_engine_sleep=True)
    ((syncs, results),) = run_ranks(train_and_count_syncs, 1, sleeping, timeout_seconds=500)
    alone = [results]
    # before the first step, and after each
    assert syncs == 1 + 3
    (both,) = run(2, config(folder, tmp_path / "two", **changes))
    for step in range(3):
        assert sorted(trained(both, step)) == sorted(trained(alone, step))
        groups = {}
        for item, ids, _ in trained(alone, step):
            groups.setdefault(item, []).append(ids[0] < 128)
        assert len(groups) == 4
        assert all(sum(right) == 1 for right in groups.values())
    metrics = alone[0][0]
    assert [m["rollout/mixed_groups"] for m in metrics] == [1.0] * 3
    assert max(m["rollout/sampling_rounds"] for m in metrics) >= 2
    assert all(0 < m["rollout/kept_groups"] < 1 for m in metrics)
    for name, tensor in alone[0][2].items():
        assert torch.allclose(both[1][2][name], tensor, atol=5e-5), name


def test_partial_rollouts_are_bounded_in_age_and_resume(folder, tmp_path):
    changes = {"partial_rollout_tokens": 3, "partial_rollout_staleness": 1, "max_steps": 4}
    saved = tmp_path / "b" / "checkpoints" / "step_000002"
    unbroken, _, resumed = run(
        2,
        config(folder, tmp_path / "a", **changes),
        config(folder, tmp_path / "b", **changes, save_steps=2),
        config(folder, tmp_path / "b", **changes, resume_from=saved),
    )
    spread = [[set(versions) for _, _, versions in trained(unbroken, step)] for step in range(4)]
    assert all(max(seen) - min(seen) <= 1 for step in spread for seen in step)
    assert any(len(seen) == 2 for step in spread for seen in step)
    # Every response is whole: it ended by itself or has the full length.
    eos = load_tokenizer(folder).eos_token_id
    assert all(ids[-1] == eos or len(ids) == 8 for step in range(4) for _, ids, _ in trained(unbroken, step))
    for got, expected in zip(resumed, unbroken, strict=True):
        assert got[1] == expected[1][2:]
        assert all(torch.equal(got[2][name], tensor) for name, tensor in expected[2].items())


def test_a_hot_first_token_is_scored_as_it_was_sampled(folder, tmp_path):
    changes = {"first_token_temperature": 3.0, "temperature": 0.5, "max_steps": 1}
    (((logged, steps, _),),) = run(1, config(folder, tmp_path / "run", **changes))
    assert logged[0]["train/gap/gap_max"] < 1e-4
    assert len({ids[0] for _, ids, _ in steps[0]}) > 4
