"""Wires a trainer from a configuration and a strategy; the one place that knows every component."""

import json
from collections.abc import Sequence
from typing import Any

from rft_engines import SamplingParams
from rft_rewards import RewardComputationEngine
from torch import nn

from rft_trainer.algorithms import LossOptions
from rft_trainer.checkpoint import CheckpointStore
from rft_trainer.config import RFTConfig
from rft_trainer.data import PromptRecord
from rft_trainer.experience.experience import Collator
from rft_trainer.experience.maker import FastExperienceMaker
from rft_trainer.experience.micro_batches import MicroBatchPlanner
from rft_trainer.preflight import RUN_MARKER
from rft_trainer.report import Console, JsonlLogger, MetricLogger, RolloutWriter, TensorBoardLogger
from rft_trainer.strategy import Strategy, TrainState
from rft_trainer.trainer.evaluation import Evaluator
from rft_trainer.trainer.ppo import PPOTrainer
from rft_trainer.trainer.update import PolicyUpdate, UpdateConfig


def build_trainer(
    config: RFTConfig,
    strategy: Strategy,
    *,
    actor: TrainState,
    initial_model: nn.Module | None,
    tokenizer: Any,
    prompts: Sequence[PromptRecord],
    held_out: Sequence[PromptRecord],
    rewards: RewardComputationEngine,
) -> PPOTrainer:
    """A trainer ready to `fit`; resumed when the configuration names a checkpoint. Collective over the world."""
    planner = MicroBatchPlanner(
        strategy.data,
        responses=config.micro_train_batch_size,
        max_tokens=config.max_tokens_per_micro_batch,
        keep_order=config.share_prompts,
    )
    collator = Collator(
        pad_token_id=tokenizer.pad_token_id, device=strategy.device, share_prompts=config.share_prompts
    )
    maker = FastExperienceMaker(
        runtime=strategy.runtime,
        rewards=rewards,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        estimator=config.advantage_estimator,
        estimator_options={},
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
    main = strategy.data.rank == 0
    trainer = PPOTrainer(
        config=config,
        actor=actor,
        reference=initial_model,
        backend=strategy.backend,
        runtime=strategy.runtime,
        data=strategy.data,
        prompts=prompts,
        sampler=strategy.build_sampler(len(prompts), config.rollout_batch_size),
        maker=maker,
        update=update,
        evaluator=_evaluator(config, strategy, maker, held_out),
        checkpoints=CheckpointStore(config.output_dir / "checkpoints", strategy.data),
        sampling=SamplingParams(
            n=config.n_samples_per_prompt,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_new_tokens=config.generate_max_len,
        ),
        loggers=_loggers(config) if main else (),
        progress=Console(enabled=main, total_steps=config.max_steps),
        keep_rollouts=RolloutWriter(
            config.output_dir / "rollouts", rank=strategy.data.rank, max_bytes=int(config.rollouts_max_mib * 2**20)
        ).write,
        strategy_name=strategy.backend.name,
    )
    if config.resume_from is not None:
        trainer.resume(
            trainer.checkpoints.load(config.resume_from, lambda folder: strategy.load_checkpoint(actor, folder))
        )
    return trainer


def update_config(config: RFTConfig, data_size: int) -> UpdateConfig:
    """The update's part of the configuration, with this rank's share of the batch."""
    fixed = config.generate_max_len if config.loss_aggregation == "seq-mean-token-sum-norm" else None
    clip_high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    return UpdateConfig(
        policy_loss=config.policy_loss,
        options=LossOptions(clip_low=config.eps_clip, clip_high=clip_high),
        aggregation=config.loss_aggregation,
        fixed_length=fixed,
        kl_coef=config.init_kl_coef,
        kl_estimator=config.kl_estimator,
        epochs=config.max_epochs,
        mini_batch_size=(config.train_batch_size or config.samples_per_step) // data_size,
        keep_groups=config.share_prompts,
        seed=config.seed,
    )


def _evaluator(
    config: RFTConfig, strategy: Strategy, maker: FastExperienceMaker, held_out: Sequence[PromptRecord]
) -> Evaluator | None:
    if not held_out:
        return None
    greedy = SamplingParams(temperature=0.0, max_new_tokens=config.generate_max_len)
    return Evaluator(
        records=held_out,
        sampling=greedy,
        maker=maker,
        data=strategy.data,
        folder=config.output_dir / "evaluation",
    )


def _loggers(config: RFTConfig) -> list[MetricLogger]:
    (config.output_dir / RUN_MARKER).write_text(json.dumps(config.as_dict(), indent=1))
    loggers: list[MetricLogger] = [JsonlLogger(config.output_dir / "metrics.jsonl")]
    if config.tensorboard:
        loggers.append(TensorBoardLogger(config.output_dir / "tensorboard"))
    return loggers
