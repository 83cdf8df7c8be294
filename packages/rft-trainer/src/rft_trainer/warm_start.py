"""The warm start of a run: supervised steps by the run's own actor and strategy, exported as a Hugging Face folder.

Reinforcement begins from that folder as from any other model, so several runs can share it by `--pretrain`.
"""

import gc
import json
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rft_trainer.config import RFTConfig
from rft_trainer.data import Demonstrations
from rft_trainer.errors import ConfigurationError
from rft_trainer.experience.experience import Collator
from rft_trainer.experience.micro_batches import MicroBatchPlanner
from rft_trainer.memory.build import warm_start_ledger
from rft_trainer.memory.forecast import WARM_START
from rft_trainer.models import Actor
from rft_trainer.optim import ScheduleConfig, reschedule
from rft_trainer.report import JsonlLogger, LoggerGroup, MetricLogger
from rft_trainer.roles import build_policy
from rft_trainer.strategy import Strategy, TrainState
from rft_trainer.trainer.steps import MiniBatchStep
from rft_trainer.trainer.supervised import AGGREGATION, SupervisedRun, SupervisedTrainer

FOLDER = "warm_start"
"""Below the run's folder: the warm-started model."""
RECORD = "warm_start.json"
"""Beside it: what was done. It is written last, so a folder without it is not finished."""
METRICS = "warm_start.jsonl"


def starting_folder(config: RFTConfig, pretrain: str) -> str:
    """The folder that reinforcement begins from: the warm-started model of the run, or `pretrain` without one."""
    return str(config.output_dir / FOLDER) if config.warm_starts else pretrain


def is_warm_started(config: RFTConfig) -> bool:
    """Whether the run's folder holds a finished warm start, as it does when the run is resumed."""
    deleted = config.overwrite and config.resume_from is None
    return config.warm_starts and not deleted and (config.output_dir / RECORD).is_file()


def warm_started_folder(config: RFTConfig) -> str | None:
    """The warm-started model that the run of the checkpoint `resume_from` began with; None where there was none.

    Raises:
        ConfigurationError: there was one, its folder is gone, and the checkpoint holds adapters on it alone.
    """
    if config.resume_from is None or not config.warm_starts:
        return None
    run = config.resume_from.resolve().parent.parent
    if (run / RECORD).is_file():
        return str(run / FOLDER)
    if config.lora_rank > 0:
        raise ConfigurationError(
            f"{config.resume_from} holds adapters on the warm-started model {run / FOLDER}, which is not there: put it "
            "and its record back beside the folder of checkpoints"
        )
    return None


def warm_start_steps(config: RFTConfig, examples: int) -> int | None:
    """Supervised optimiser steps of the run with so many demonstrations; None: its budget of seconds decides.

    Raises:
        ConfigurationError: the schedule does not fit into the steps.
    """
    if config.warm_start_seconds is not None:
        return None
    per_epoch = math.ceil(examples / config.warm_start_batch_size)
    steps = config.warm_start_epochs * per_epoch if config.warm_start_steps is None else config.warm_start_steps
    try:
        config.warm_start_optimizer(steps)
    except ConfigurationError as problem:
        raise ConfigurationError(
            f"warm_start_lr_warmup_steps is {config.warm_start_lr_warmup_steps} and the warm start has {steps} steps "
            f"({examples} answers, {config.warm_start_batch_size} a step): {problem}"
        ) from problem
    return steps


def warm_start(
    config: RFTConfig,
    strategy: Strategy,
    *,
    folder: str,
    tokenizer: Any,
    demonstrations: Demonstrations,
    say: Callable[[str], None],
) -> SupervisedRun:
    """Train the model of `folder` on the demonstrations and export it. Collective over the world.

    What the run freezes stays fixed; adapters come with reinforcement only. All of the training state is gone
    afterwards.
    """
    examples = demonstrations.examples
    steps = warm_start_steps(config, len(examples))
    actor = strategy.prepare(imitating_policy(config, folder, bf16=strategy.bf16), config.warm_start_optimizer(steps))
    ledger = warm_start_ledger(config, strategy, actor)
    say(_announcement(config, demonstrations, steps))
    # A warm start that was not finished begins anew, and so does its record.
    logger = LoggerGroup([JsonlLogger(config.output_dir / METRICS, resume_after=0)] if strategy.data.rank == 0 else ())
    with closing(logger):
        ledger.begin()
        done = _trainer(config, strategy, tokenizer, demonstrations, logger, say).run(
            actor,
            steps=steps,
            seconds=config.warm_start_seconds,
            on_plan=partial(_follow_plan, config, actor) if steps is None else lambda steps: None,
        )
        ledger.end(WARM_START)
    strategy.save_model(actor, config.output_dir / FOLDER, tokenizer)
    strategy.on_main(lambda: _write_record(config, strategy, folder, demonstrations, done))
    say(
        f"warm start: {done.steps} steps in {done.seconds:.1f} s, {done.trained_tokens} answer tokens, "
        f"loss {done.first_loss:.3f} to {done.last_loss:.3f}"
    )
    strategy.release(actor)
    del actor
    _free(strategy.device)
    return done


def imitating_policy(config: RFTConfig, folder: str, *, bf16: bool) -> Actor:
    """The policy of the supervised steps: whole weights, and what the run freezes stays fixed.

    Gold answers are imitated under the plain distribution, whatever rollouts are sampled from.
    """
    plain = replace(config, temperature=1.0, top_p=1.0, top_k=0, first_token_temperature=None, lora_rank=0)
    return build_policy(plain, folder, bf16=bf16)


def _trainer(
    config: RFTConfig,
    strategy: Strategy,
    tokenizer: Any,
    demonstrations: Demonstrations,
    logger: MetricLogger,
    say: Callable[[str], None],
) -> SupervisedTrainer:
    step = MiniBatchStep(
        backend=strategy.backend,
        data=strategy.data,
        planner=MicroBatchPlanner(
            strategy.data,
            responses=config.warm_start_micro_batch_size,
            max_tokens=config.warm_start_max_tokens,
        ),
        collator=Collator(pad_token_id=tokenizer.pad_token_id, device=strategy.device, layout=config.warm_start_layout),
        aggregation=AGGREGATION,
    )
    return SupervisedTrainer(
        step=step,
        sampler=strategy.build_sampler(len(demonstrations.examples), config.warm_start_batch_size),
        examples=demonstrations.examples,
        data=strategy.data,
        logger=logger,
        say=say,
    )


def _follow_plan(config: RFTConfig, actor: TrainState, steps: int) -> None:
    """The configured decay, over the steps that the budget of seconds turned out to be for."""
    if steps > config.warm_start_lr_warmup_steps:
        schedule: ScheduleConfig = config.warm_start_optimizer(steps).schedule
        reschedule(actor.scheduler, schedule)


def _announcement(config: RFTConfig, demonstrations: Demonstrations, steps: int | None) -> str:
    length = f"{config.warm_start_seconds:g} s" if steps is None else f"{steps} steps"
    left_out = f" ({demonstrations.left_out} longer ones left out)" if demonstrations.left_out else ""
    return (
        f"warm start: {length} on {len(demonstrations.examples)} gold answers{left_out}, "
        f"{config.warm_start_batch_size} a step"
    )


def _write_record(
    config: RFTConfig, strategy: Strategy, folder: str, demonstrations: Demonstrations, done: SupervisedRun
) -> None:
    record = {
        "model": folder,
        "examples": len(demonstrations.examples),
        "left_out": demonstrations.left_out,
        "epochs": done.answers / len(demonstrations.examples),
        "budget_seconds": config.warm_start_seconds,
        "ranks": strategy.data.size,
        **asdict(done),
    }
    (config.output_dir / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


def read_record(run: Path) -> dict[str, Any]:
    """What `warm_start` noted in the folder of a run.

    Raises:
        ConfigurationError: there is no finished warm start.
    """
    try:
        record: dict[str, Any] = json.loads((run / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{run} holds no finished warm start ({error}); give the folder of a run") from error
    return record


def _free(device: torch.device) -> None:
    """Sharded modules are cycles of references; an engine that measures the device must find their memory free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
