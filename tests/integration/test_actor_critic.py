"""PPO with a critic, end to end: the same whatever the spread, resumed bit by bit, and each model steps for itself."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from integration.kept_metrics import KeptMetrics
from rft_dist.testing import run_ranks
from rft_engines import EngineConfig
from rft_rewards import RewardComputationEngine, RewardRecipe, RewardSample
from rft_sync import source_for
from rft_trainer.config import RFTConfig
from rft_trainer.data import PromptDataset, RecordFields
from rft_trainer.errors import NumericalError
from rft_trainer.models import Actor, load_causal_model, load_tokenizer
from rft_trainer.roles import prepare_critic
from rft_trainer.session import Ingredients, build_trainer
from rft_trainer.strategy import get_strategy
from rft_trainer.testing import tiny_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def low_bytes(samples: Sequence[RewardSample]) -> list[float]:
    return [sum(i < 128 for i in s.response_ids) / max(1, len(s.response_ids)) for s in samples]


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


def weights_of(module):
    source = source_for(module)
    names = [meta.name for meta in source.metadata()]
    with source.gather(names) as tensors:
        return {name: tensors[name].detach().clone() for name in names}


def train(rank, world, settings, poison=None):
    """(metrics of each step, weights of actor and critic); `poison`: rank whose rewards are NaN in the second step."""
    tokenizer = load_tokenizer(settings.pretrain)
    fields = RecordFields(reference_key=None)
    records = [fields.record({"question": f"say {i}"}, f"made:{i}") for i in range(8)]
    prompts = PromptDataset(records, tokenizer, max_prompt_tokens=200)
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
        before = weights_of(actor.network)
        trainer.logger = kept = KeptMetrics()
        trainer.runtime.update_engine_weights(actor)
        while trainer.finished_steps < settings.max_steps:
            trainer.step()
            if trainer.finished_steps == settings.save_steps:
                trainer.save()
        return kept.steps, before, weights_of(actor.network), weights_of(critic.network)


def run(world, settings, **options):
    return run_ranks(train, world, settings, timeout_seconds=500, **options)


def assert_same(result, reference, *, exact=False):
    for got, expected in zip(result[2:], reference[2:], strict=True):
        for name, tensor in expected.items():
            # A fortieth of one step of the critic: single entries with next to no gradient feel rounding.
            same = torch.equal(got[name], tensor) if exact else torch.allclose(got[name], tensor, atol=5e-4)
            assert same, name


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    return run(1, config(folder, tmp_path_factory.mktemp("alone")))[0]


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


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, {"packing": True, "micro_train_batch_size": 3}),
        (2, {"fsdp": False, "zero_stage": 2, "padding_side": "left", "micro_train_batch_size": 1}),
        pytest.param(4, {"fsdp": False, "zero_stage": 3}, marks=pytest.mark.slow),
    ],
)
def test_the_result_is_that_of_one_process(folder, alone, tmp_path, world, changes):
    for result in run(world, config(folder, tmp_path / "run", **changes)):
        assert_same(result, alone)
        for got, expected in zip(result[0], alone[0], strict=True):
            numbers = [name for name in expected if name.startswith(("train/", "rollout/"))]
            assert {n: got[n] for n in numbers} == pytest.approx({n: expected[n] for n in numbers}, rel=2e-3, abs=2e-4)


def in_turn(rank, world, plans):
    """Several runs by the same processes."""
    return [train(rank, world, settings) for settings in plans]


@pytest.mark.parametrize(
    "strategy",
    [{"fsdp": True}, *(pytest.param({"fsdp": False, "zero_stage": s}, marks=pytest.mark.slow) for s in (2, 3))],
    ids=lambda strategy: "fsdp2" if strategy["fsdp"] else f"zero{strategy['zero_stage']}",
)
def test_resume_is_bit_equal_with_critic_and_coefficient(folder, tmp_path, strategy):
    """From a checkpoint of the warm-up too, when the actor's optimiser has not begun; saving itself changes nothing."""
    saved = tmp_path / "b" / "checkpoints" / "step_000001"
    plans = [
        config(folder, tmp_path / "a", **strategy),
        config(folder, tmp_path / "b", save_steps=1, **strategy),
        config(folder, tmp_path / "c", resume_from=saved, **strategy),
    ]
    for unbroken, *others in run_ranks(in_turn, 2, plans, timeout_seconds=500):
        for got in others:
            assert_same(got, unbroken, exact=True)
            assert got[0][-1]["train/kl_coef"] == unbroken[0][-1]["train/kl_coef"]
            assert got[0][-1]["rollout/reward"] == unbroken[0][-1]["rollout/reward"]


def test_a_nan_on_one_rank_skips_the_actors_step_on_all_and_the_critic_goes_on(folder, tmp_path):
    results = run_ranks(train, 2, config(folder, tmp_path / "nan", max_steps=2), 1, timeout_seconds=500)
    for logged, before, actor, _ in results:
        # Each epoch visits the poisoned response: both steps of the actor are skipped, none of the critic's.
        assert (logged[1]["train/updates"], logged[1]["train/skipped_updates"]) == (0, 2)
        assert (logged[1]["train/critic/updates"], logged[1]["train/critic/skipped_updates"]) == (2, 0)
        assert all(torch.equal(actor[name], before[name]) for name in before)


def drift(rank, world, settings):
    with pytest.raises(NumericalError, match="over the stop limit"):
        train(rank, world, settings)
    return True


def test_a_gap_over_the_limit_stops_all_ranks(folder, tmp_path):
    settings = config(folder, tmp_path / "gap", gap_warn=None, gap_stop=1e-12, critic_warmup_steps=0)
    assert run_ranks(drift, 2, settings, timeout_seconds=500) == [True, True]
