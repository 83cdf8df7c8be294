"""Training runs of a tiny model on made prompts, for tests that look at what is saved, resumed and spread."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft_engines import EngineConfig
from rft_rewards import RewardComputationEngine, RewardRecipe, RewardSample
from rft_sync import source_for
from rft_trainer.checkpoint import resolve_resume
from rft_trainer.config import RFTConfig
from rft_trainer.data import PromptDataset, RecordFields
from rft_trainer.models import Actor, load_causal_model, load_tokenizer
from rft_trainer.session import Ingredients, build_trainer
from rft_trainer.strategy import get_strategy

PROMPTS = 6

Watch = Callable[[Any, int, int], None]
"""Called with (trainer, rank, step) when the rollouts of a step are about to be kept."""


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


def stop_at(wanted, trainer, rank, step):
    """A `Watch` that ends the run on all ranks."""
    if step == wanted:
        raise StopError


def train(rank, world, settings, watch: Watch | None = None):
    """Run the trainer to its end; (weights version, full weights, texts of the last rollout). None after StopError."""
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

        def kept(step, experiences):
            if watch is not None:
                watch(trainer, rank, step)
            keep(step, experiences)
            texts.append([(e.group, e.response) for e in experiences])

        trainer.keep_rollouts = kept
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
    """Several runs by the same processes, which is most of a run's price: (settings, watch) each."""
    return [train(rank, world, *plan) for plan in plans]
