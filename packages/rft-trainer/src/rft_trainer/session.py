"""Wires a trainer from a configuration and a strategy; the one place that knows every component."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rft_engines import SamplingParams
from rft_rewards import RewardComputationEngine
from rft_trainer.checkpoint import CheckpointStore, RetentionPolicy, TrainerState, fitted_settings
from rft_trainer.config import RFTConfig
from rft_trainer.data import BlendedDataset, BlendSampler, EncodedPrompt, Sampler
from rft_trainer.experience.experience import Collator, Experience
from rft_trainer.experience.maker import FastExperienceMaker
from rft_trainer.experience.micro_batches import MicroBatchPlanner
from rft_trainer.preflight import RUN_MARKER
from rft_trainer.report import (
    Column,
    Console,
    JsonlLogger,
    LoggerGroup,
    MetricLogger,
    Rollout,
    RolloutWriter,
    TensorBoardLogger,
)
from rft_trainer.strategy import Strategy, TrainState
from rft_trainer.trainer.evaluation import Evaluator, three_extractors
from rft_trainer.trainer.ppo import PPOTrainer
from rft_trainer.trainer.update import PolicyUpdate, UpdateConfig

STEP_COLUMNS = (
    Column("rollout/reward", "reward"),
    Column("rollout/accuracy", "accuracy", ".1%"),
    Column("train/kl", "kl", ".4f"),
    Column("train/clip_fraction", "clip", ".3f"),
    Column("rollout/response_length", "length", ".1f"),
    Column("rollout/mixed_groups", "mixed", ".0%"),
    Column("train/gap/gap", "gap", ".1e"),
    Column("train/grad_norm", "grad", ".2f"),
    *(
        Column(f"perf/seconds_{name}", f"{name} s", ".1f")
        for name in ("step", "generate", "reference", "rewards", "update", "sync")
    ),
)


@dataclass(frozen=True, kw_only=True)
class Ingredients:
    """What an app brings: models as the strategy wrapped them, tokenizer, prompts and rewards."""

    actor: TrainState
    initial_model: nn.Module | None
    tokenizer: Any
    prompts: Sequence[EncodedPrompt]
    held_out: Sequence[EncodedPrompt] | Mapping[str, Sequence[EncodedPrompt]]
    """One set, or several by name."""
    rewards: RewardComputationEngine


def build_trainer(config: RFTConfig, strategy: Strategy, ingredients: Ingredients) -> PPOTrainer:
    """A trainer ready to `fit`; resumed when the configuration names a checkpoint. Collective over the world."""
    actor, data = ingredients.actor, strategy.data
    maker, update = _maker_and_update(config, strategy, ingredients)
    checkpoints = CheckpointStore(config.output_dir / "checkpoints", data, _retention(config))
    settings = fitted_settings(config, strategy.model_form(actor))
    resumed: TrainerState | None = None
    if config.resume_from is not None:
        resumed = checkpoints.load(
            config.resume_from,
            lambda folder: strategy.load_checkpoint(actor, folder),
            strategy=strategy.backend.name,
            resizable=strategy.backend.resizable,
            settings=settings,
        )
    finished = finished_steps(config, resumed)
    if finished is not None:
        data.on_main(lambda: drop_later_files(config.output_dir, finished))
    main = data.rank == 0
    trainer = PPOTrainer(
        config=config,
        actor=actor,
        reference=ingredients.initial_model,
        backend=strategy.backend,
        runtime=strategy.runtime,
        data=data,
        prompts=ingredients.prompts,
        sampler=_sampler(config, strategy, ingredients.prompts),
        maker=maker,
        update=update,
        evaluator=make_evaluator(config, strategy, maker, ingredients.held_out),
        checkpoints=checkpoints,
        settings=settings,
        sampling=SamplingParams(
            n=config.n_samples_per_prompt,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_new_tokens=config.generate_max_len,
        ),
        logger=LoggerGroup(_loggers(config, finished) if main else ()),
        progress=Console(enabled=main, columns=STEP_COLUMNS),
        keep_rollouts=_rollout_keeper(config, data.rank),
    )
    if resumed is not None:
        trainer.resume(resumed)
    return trainer


def _sampler(config: RFTConfig, strategy: Strategy, prompts: Sequence[EncodedPrompt]) -> Sampler:
    if not isinstance(prompts, BlendedDataset):
        return strategy.build_sampler(len(prompts), config.rollout_batch_size)
    return BlendSampler(
        prompts.sizes,
        prompts.weights,
        batch_size=config.rollout_batch_size,
        rank=strategy.data.rank,
        num_ranks=strategy.data.size,
        seed=config.seed,
    )


def experience_maker(config: RFTConfig, strategy: Strategy, ingredients: Ingredients) -> FastExperienceMaker:
    """The maker of a run that only evaluates."""
    return _maker_and_update(config, strategy, ingredients)[0]


def _maker_and_update(
    config: RFTConfig, strategy: Strategy, ingredients: Ingredients
) -> tuple[FastExperienceMaker, PolicyUpdate]:
    tokenizer = ingredients.tokenizer
    planner = MicroBatchPlanner(
        strategy.data,
        responses=config.micro_train_batch_size,
        max_tokens=config.max_tokens_per_micro_batch,
        keep_order=config.share_prompts,
    )
    collator = Collator(pad_token_id=tokenizer.pad_token_id, device=strategy.device, share_prompts=config.share_prompts)
    maker = FastExperienceMaker(
        runtime=strategy.runtime,
        rewards=ingredients.rewards,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        estimator=config.advantage_estimator,
        data=strategy.data,
        planner=planner,
        collator=collator,
        # One update per rollout: its own forward, detached, is the old policy.
        score_with_actor=config.updates_per_step > 1,
        base_seed=config.seed,
    )
    update = PolicyUpdate(
        update_config(config, strategy.data.size),
        backend=strategy.backend,
        data=strategy.data,
        planner=planner,
        collator=collator,
        on_step=strategy.runtime.note_update,
    )
    return maker, update


def update_config(config: RFTConfig, data_size: int) -> UpdateConfig:
    """The update's part of the configuration, with this rank's share of the batch."""
    fixed = config.generate_max_len if config.loss_aggregation == "seq-mean-token-sum-norm" else None
    return UpdateConfig(
        policy_loss=config.policy_loss,
        options=config.loss_options(),
        aggregation=config.loss_aggregation,
        fixed_length=fixed,
        kl_coef=config.init_kl_coef,
        kl_estimator=config.kl_estimator,
        epochs=config.max_epochs,
        mini_batch_size=(config.train_batch_size or config.samples_per_step) // data_size,
        keep_groups=config.share_prompts,
        seed=config.seed,
    )


def make_evaluator(
    config: RFTConfig,
    strategy: Strategy,
    maker: FastExperienceMaker,
    held_out: Sequence[EncodedPrompt] | Mapping[str, Sequence[EncodedPrompt]],
) -> Evaluator | None:
    """The evaluator of a run; None without a held-out set."""
    if not held_out:
        return None
    return Evaluator(
        sets=held_out if isinstance(held_out, Mapping) else {"": held_out},
        sampling=evaluation_sampling(config),
        maker=maker,
        data=strategy.data,
        extractors=three_extractors() if config.eval_extractors else (),
        pass_at=config.eval_pass_at,
        majority=config.eval_majority,
        folder=config.output_dir / "evaluation",
    )


def evaluation_sampling(config: RFTConfig) -> SamplingParams:
    """The evaluation's own sampling."""
    return SamplingParams(
        n=config.eval_samples,
        temperature=config.eval_temperature,
        top_p=config.eval_top_p,
        top_k=config.eval_top_k,
        max_new_tokens=config.eval_max_len or config.generate_max_len,
    )


def _rollout_keeper(config: RFTConfig, rank: int) -> Callable[[int, Sequence[Experience]], None]:
    """Each rank keeps its own responses, in files of its own."""
    total = int(config.rollouts_max_mib * 2**20)
    writer = RolloutWriter(
        config.output_dir / "rollouts", max_step_bytes=total, max_total_bytes=total, name=f"rank{rank}"
    )

    def keep(step: int, experiences: Sequence[Experience]) -> None:
        writer.write(step, map(rollout_of, experiences))

    return keep


def rollout_of(experience: Experience) -> Rollout:
    """The readable form of an experience."""
    advantages, trainer = experience.advantages, experience.old_log_probs
    return Rollout(
        prompt_id=experience.prompt_id,
        prompt=experience.prompt,
        response=experience.response,
        reference=experience.reference,
        reward=experience.reward,
        scores=experience.scores,
        length=len(experience.response_ids),
        truncated=experience.truncated,
        advantage=float(advantages.mean()) if advantages is not None and len(advantages) else 0.0,
        engine_log_probs=tuple(experience.engine_log_probs.tolist()),
        trainer_log_probs=() if trainer is None else tuple(trainer.tolist()),
        weights_version=experience.weights_version,
    )


def _retention(config: RFTConfig) -> RetentionPolicy:
    return RetentionPolicy(
        count=config.max_checkpoints,
        bytes=int(config.max_checkpoints_gib * 2**30),
        metric=config.best_metric,
        lowest=config.best_metric_lowest,
    )


def finished_steps(config: RFTConfig, resumed: TrainerState | None) -> int | None:
    """Steps whose logs stay; -1: none of those of a run that ended before its first checkpoint; None: a new run."""
    if resumed is not None:
        return resumed.step
    return -1 if config.resume == "auto" else None


def drop_later_files(output_dir: Path, finished: int) -> None:
    """Remove rollouts and evaluations of steps after `finished`: they are made again, perhaps by other ranks."""
    for folder in ("rollouts", "evaluation"):
        for file in sorted((output_dir / folder).glob("*.jsonl")):
            step = re.search(r"[-_](\d{6})", file.name)
            if step is not None and int(step.group(1)) > finished:
                file.unlink()


def _loggers(config: RFTConfig, finished_steps: int | None) -> list[MetricLogger]:
    (config.output_dir / RUN_MARKER).write_text(json.dumps(config.as_dict(), indent=1))
    loggers: list[MetricLogger] = [JsonlLogger(config.output_dir / "metrics.jsonl", resume_after=finished_steps)]
    if config.tensorboard:
        loggers.append(TensorBoardLogger(config.output_dir / "tensorboard", resume_after=finished_steps))
    return loggers
