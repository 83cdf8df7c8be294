"""A run whose models come and go by phase is the run in which everything stays."""

from functools import partial

import pytest
import torch

from integration.plain_training import config, train
from integration.test_training_run import assert_same
from rft_dist.testing import run_ranks
from rft_engines import EngineConfig, EngineStateError
from rft_rewards import RewardComputationEngine, RewardRecipe
from rft_trainer.data import PromptDataset, RecordFields
from rft_trainer.errors import ResidencyError, StaleWeightsError
from rft_trainer.models import Actor, load_causal_model, load_tokenizer, padded_layout
from rft_trainer.session import Ingredients, build_trainer
from rft_trainer.strategy import deepspeed, fsdp, get_strategy
from rft_trainer.strategy.residency import HostMirror, MovableMemory
from rft_trainer.testing import tiny_model_folder

SHAPE = {"init_kl_coef": 0.1, "max_epochs": 2, "max_steps": 2, "micro_train_batch_size": 8}
STAGED = {"enable_engine_sleep": True, "offload_trained": True, "offload_frozen": True}
STRATEGIES = {
    "fsdp2": {"fsdp": True, "adam_offload": True},
    "zero2": {"fsdp": False, "zero_stage": 2},
    "zero3": {"fsdp": False, "zero_stage": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def really_move():
    """Copy and free on the CPU too, as on a GPU, in this process."""
    moving = partial(MovableMemory, copies=True, mirror=None)

    def make(*args, **options):
        return moving(*args, **{**options, "mirror": HostMirror(pinned=False, chunk_bytes=1 << 16)})

    fsdp.MovableMemory = make
    deepspeed.MovableMemory = make


def train_staged(rank, world, settings):
    really_move()
    return train(rank, world, settings)


@pytest.mark.parametrize(
    ("kind", "world"),
    [("fsdp2", 2), ("zero2", 2), *(pytest.param(k, w, marks=pytest.mark.slow) for k in STRATEGIES for w in (1, 4))],
)
def test_the_result_is_that_of_a_run_in_which_everything_stays(folder, tmp_path, kind, world):
    strategy = STRATEGIES[kind]
    plain = {**strategy, "adam_offload": False}
    stays = run_ranks(train, world, config(folder, tmp_path / "stays", **SHAPE, **plain), timeout_seconds=500)
    staged = run_ranks(
        train_staged, world, config(folder, tmp_path / "staged", **SHAPE, **STAGED, **strategy), timeout_seconds=500
    )
    assert_same(staged, stays, exact=True)
    lines = (tmp_path / "staged" / "metrics.jsonl").read_text()
    assert "memory/offload_gigabytes_per_second" in lines


def interrupted(rank, world, settings):
    """Failures at each border, and what the next call says."""
    really_move()
    tokenizer = load_tokenizer(settings.pretrain)
    record = RecordFields(reference_key=None).record({"question": "say"}, "made:0")
    prompts = PromptDataset([record] * 4, tokenizer, max_prompt_tokens=200)
    failing = {"on": False}

    def reward(samples):
        if failing["on"]:
            raise OSError("the judge is away")
        return [float(len(s.response_ids)) for s in samples]

    with get_strategy(settings).setup_distributed() as strategy:
        strategy.on_main(lambda: settings.output_dir.mkdir(parents=True, exist_ok=True))
        actor = strategy.prepare(Actor(load_causal_model(settings.pretrain)))
        reference = strategy.prepare_frozen(Actor(load_causal_model(settings.pretrain)))
        strategy.create_engine(EngineConfig(model_path=settings.pretrain))
        trainer = build_trainer(
            settings,
            strategy,
            Ingredients(
                actor=actor,
                initial_model=reference,
                tokenizer=tokenizer,
                prompts=prompts,
                held_out=(),
                rewards=RewardComputationEngine(RewardRecipe(functions=[reward])),
            ),
        )
        with trainer._clock("sync"):
            trainer.runtime.update_engine_weights(actor)
        # In the rewards the weights are dropped already: the next rollout gets them again, under their version.
        failing["on"] = True
        with pytest.raises(Exception, match="the judge is away"):
            trainer.step()
        failing["on"] = False
        assert trainer.runtime.weights_version == 1
        trainer.step()
        assert trainer.runtime.weights_version == 2
        # In the update, after an optimiser step: the engine lacks weights and says what it wants.
        update = trainer.update

        def half(*args, **options):
            update(*args, **options)
            raise OSError("power cut")

        trainer.update = half
        with pytest.raises(OSError, match="power cut"):
            trainer.step()
        trainer.update = update
        with pytest.raises((EngineStateError, StaleWeightsError), match="older than the actor"):
            trainer.step()
        with trainer._clock("sync"):
            trainer.runtime.update_engine_weights(actor)
        trainer.step()
        # A model that is away refuses to run, and is brought back by name.
        strategy.offload_model(reference)
        layout = padded_layout([torch.tensor([5])], [torch.tensor([6])], 0)
        with pytest.raises(ResidencyError, match="forward pass refused: reference is on the host"):
            reference(layout)
        strategy.offload_model(actor)
        with pytest.raises(ResidencyError, match="update_engine_weights refused: actor is on the host"):
            strategy.update_engine_weights(actor)
        strategy.reload_model(reference)
        strategy.reload_model(actor)
        reference(layout)
        return trainer.runtime.weights_version


def test_after_an_exception_the_next_call_works_or_says_why_not(folder, tmp_path):
    settings = config(folder, tmp_path / "run", **{**SHAPE, "max_epochs": 1}, **STAGED, **STRATEGIES["fsdp2"])
    assert run_ranks(interrupted, 1, settings, timeout_seconds=500) == [4]
