"""PPO with a critic, end to end: the same whatever the spread, resumed bit by bit, and each model steps for itself."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from integration.kept_metrics import KeptMetrics
from integration.made_prompts import low_bytes, made_prompts, whole_weights
from rft_dist.testing import run_ranks
from rft_engines import EngineConfig
from rft_rewards import RewardComputationEngine, RewardRecipe
from rft_trainer.config import RFTConfig
from rft_trainer.errors import NumericalError
from rft_trainer.models import Actor, load_causal_model, load_tokenizer
from rft_trainer.roles import prepare_critic
from rft_trainer.session import Ingredients, build_trainer
from rft_trainer.strategy import get_strategy
from rft_trainer.testing import tiny_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def config(folder, output, **changes):
    base = RFTConfig(
        pretrain=folder,
        fsdp=True,
        output_dir=Path(output),
        advantage_estimator="gae",
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        generate_max_len=6,
        max_epochs=2,
        actor_learning_rate=5e-3,
        critic_learning_rate=2e-2,
        critic_warmup_steps=1,
        init_kl_coef=0.1,
        kl_in_reward=True,
        kl_target=0.001,
        kl_horizon=40.0,
        # Not "centre": the first gradient of the critic's bias would be 0 but for rounding, and Adam makes a whole step
        # of its sign.
        reward_normalisation="scale",
        overlong_buffer=3,
        entropy_coef=0.01,
        importance_sampling="truncate",
        max_steps=3,
        tensorboard=False,
        seed=5,
    )
    return replace(base, **changes)


def train(rank, world, settings, poison=None):
    """(metrics of each step, weights of actor and critic); `poison`: rank whose rewards are NaN in the second step."""
    tokenizer = load_tokenizer(settings.pretrain)
    prompts = made_prompts(tokenizer, 8)
    with get_strategy(settings).setup_distributed() as strategy:
        strategy.on_main(lambda: settings.output_dir.mkdir(parents=True, exist_ok=True))
        actor = strategy.prepare(Actor(load_causal_model(settings.pretrain)))
        critic = prepare_critic(settings, strategy, settings.pretrain)
        initial = strategy.prepare_frozen(Actor(load_causal_model(settings.pretrain)))
        strategy.create_engine(EngineConfig(model_path=settings.pretrain))
        trainer = build_trainer(
            settings,
            strategy,
            Ingredients(
                actor=actor,
                initial_model=initial,
                critic=critic,
                tokenizer=tokenizer,
                prompts=prompts,
                held_out=(),
                rewards=RewardComputationEngine(RewardRecipe(functions=[low_bytes])),
            ),
        )
        if poison is not None:
            learnable = trainer.maker.learnable

            def poisoned(experiences, roles, timer):
                metrics = learnable(experiences, roles, timer)
                if trainer.finished_steps == 1 and rank == poison:
                    experiences[0].advantages = experiences[0].advantages * float("nan")
                return metrics

            trainer.maker.learnable = poisoned
        before = whole_weights(actor.network)
        trainer.logger = kept = KeptMetrics()
        trainer.runtime.update_engine_weights(actor)
        while trainer.finished_steps < settings.max_steps:
            trainer.step()
            if trainer.finished_steps == settings.save_steps:
                trainer.save()
        return kept.steps, before, whole_weights(actor.network), whole_weights(critic.network)


def assert_same(result, reference, *, exact=False):
    for got, expected in zip(result[2:], reference[2:], strict=True):
        for name, tensor in expected.items():
            # A fortieth of one step of the critic: single entries with next to no gradient feel rounding.
            same = torch.equal(got[name], tensor) if exact else torch.allclose(got[name], tensor, atol=5e-4)
            assert same, name


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    return run_ranks(train, 1, config(folder, tmp_path_factory.mktemp("alone")), timeout_seconds=500)[0]


def test_the_critic_learns_first_and_the_actor_waits(alone):
    logged, before, actor, critic = alone
    assert [m["train/updates"] for m in logged] == [0, 2, 2]
    assert [m["train/critic/updates"] for m in logged] == [2, 2, 2]
    assert logged[0]["train/critic/learning_rate"] == pytest.approx(2e-2)
    assert logged[1]["train/learning_rate"] == pytest.approx(5e-3)
    assert critic["head.weight"].abs().max() > 1e-3
    assert max(float((actor[name] - before[name]).abs().max()) for name in before) > 1e-3
    # the divergence from the reference is 0 while the actor waits, so the coefficient falls by a fifth of 8 / 40
    assert logged[0]["rollout/kl"] == pytest.approx(0.0, abs=1e-6)
    assert logged[1]["train/kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 8 / 40))
    assert all(0.99 < m["train/gap/effective_sample_size"] <= 1.0 + 1e-6 for m in logged[1:])


SPREADS = {
    "packed": {"packing": True, "micro_train_batch_size": 3},
    "left zero2": {"fsdp": False, "zero_stage": 2, "padding_side": "left", "micro_train_batch_size": 1},
}


def in_turn(rank, world, plans):
    """Several runs by the same processes: (settings, rank that is poisoned) each."""
    return [train(rank, world, *plan) for plan in plans]


def run_in_turn(world, plans):
    """Results of each plan by name, and by rank."""
    results = run_ranks(in_turn, world, [(settings, None) for settings in plans.values()], timeout_seconds=550)
    return {name: [of_rank[number] for of_rank in results] for number, name in enumerate(plans)}


def resume_plans(folder, place, strategy):
    """Unbroken, with checkpoints, and from one of the warm-up, when the actor's optimiser has not begun."""
    return {
        "unbroken": config(folder, place / "a", **strategy),
        "saving": config(folder, place / "b", save_steps=1, **strategy),
        "resumed": config(folder, place / "c", resume_from=place / "b" / "checkpoints" / "step_000001", **strategy),
    }


@pytest.fixture(scope="module")
def two_processes(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("two_processes")
    plans = {name: config(folder, place / name, **changes) for name, changes in SPREADS.items()}
    return run_in_turn(2, {**plans, **resume_plans(folder, place, {"fsdp": True})})


def assert_spread_does_not_matter(results, alone):
    for result in results:
        assert_same(result, alone)
        for got, expected in zip(result[0], alone[0], strict=True):
            numbers = [name for name in expected if name.startswith(("train/", "rollout/"))]
            assert {n: got[n] for n in numbers} == pytest.approx({n: expected[n] for n in numbers}, rel=2e-3, abs=2e-4)


@pytest.mark.parametrize("spread", SPREADS)
def test_the_result_is_that_of_one_process(alone, two_processes, spread):
    assert_spread_does_not_matter(two_processes[spread], alone)


@pytest.mark.slow
def test_the_result_of_four_processes_is_that_of_one(folder, alone, tmp_path):
    settings = config(folder, tmp_path / "run", fsdp=False, zero_stage=3)
    assert_spread_does_not_matter(run_ranks(train, 4, settings, timeout_seconds=500), alone)


def assert_resumed(runs):
    for saving, resumed, unbroken in zip(runs["saving"], runs["resumed"], runs["unbroken"], strict=True):
        for got in (saving, resumed):
            assert_same(got, unbroken, exact=True)
            assert got[0][-1]["train/kl_coef"] == unbroken[0][-1]["train/kl_coef"]
            assert got[0][-1]["rollout/reward"] == unbroken[0][-1]["rollout/reward"]


def test_resume_is_bit_equal_with_critic_and_coefficient(two_processes):
    """Saving itself changes nothing either."""
    assert_resumed(two_processes)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_resume_under_zero_is_bit_equal_with_critic_and_coefficient(folder, tmp_path, stage):
    assert_resumed(run_in_turn(2, resume_plans(folder, tmp_path, {"fsdp": False, "zero_stage": stage})))


def nan_then_drift(rank, world, poisoned, drifting):
    found = train(rank, world, poisoned, 1)
    with pytest.raises(NumericalError, match="over the stop limit"):
        train(rank, world, drifting)
    return found


def test_a_nan_on_one_rank_skips_the_actors_step_on_all_and_a_gap_stops_all(folder, tmp_path):
    """A step of the actor is skipped and the critic goes on; a gap over the limit ends the run on both ranks."""
    poisoned = config(folder, tmp_path / "nan", max_steps=2)
    drifting = config(folder, tmp_path / "gap", gap_warn=None, gap_stop=1e-12, critic_warmup_steps=0)
    for logged, before, actor, _ in run_ranks(nan_then_drift, 2, poisoned, drifting, timeout_seconds=500):
        # Each epoch visits the poisoned response: both steps of the actor are skipped, none of the critic's.
        assert (logged[1]["train/updates"], logged[1]["train/skipped_updates"]) == (0, 2)
        assert (logged[1]["train/critic/updates"], logged[1]["train/critic/skipped_updates"]) == (2, 0)
        assert all(torch.equal(actor[name], before[name]) for name in before)
