"""The files that a run leaves for people: metrics, rollouts, and what of them stays when it is resumed."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rft_trainer.checkpoint import TrainerState
from rft_trainer.config import RFTConfig
from rft_trainer.experience.experience import Experience
from rft_trainer.memory.forecast import WARM_START
from rft_trainer.preflight import RUN_MARKER
from rft_trainer.report import (
    JsonlLogger,
    MetricLogger,
    Rollout,
    RolloutWriter,
    TensorBoardLogger,
    WandbLogger,
    token_texts,
)

LEAST_STEP_BYTES = 64 * 2**10
"""Of one rank's rollouts of one step, however long the run is."""


def rollout_keeper(
    config: RFTConfig, *, tokenizer: Any, rank: int, world_size: int
) -> Callable[[int, Sequence[Experience]], None]:
    """Each rank keeps its own responses, in files of its own; all ranks and steps together stay within the limit."""
    total = int(config.rollouts_max_mib * 2**20) // world_size
    writer = RolloutWriter(
        config.output_dir / "rollouts",
        max_step_bytes=min(total, max(total // max(1, config.max_steps), LEAST_STEP_BYTES)),
        max_total_bytes=total,
        name=f"rank{rank}",
    )

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def keep(step: int, experiences: Sequence[Experience]) -> None:
        writer.write(step, (rollout_of(experience, decode) for experience in experiences), count=len(experiences))

    return keep


def rollout_of(experience: Experience, decode: Callable[[Sequence[int]], str]) -> Rollout:
    """The readable form of an experience; `decode` keeps special tokens."""
    advantages, latest = experience.advantages, experience.update_log_probs
    # With one update a rollout its own forward is the old policy.
    behaviour = latest if experience.old_log_probs is None else experience.old_log_probs
    ratios = None if latest is None or behaviour is None else (latest - behaviour).exp()
    ids = experience.response_ids.tolist()
    mask = tuple(int(kept) for kept in experience.response_mask.tolist())
    return Rollout(
        group=experience.group,
        prompt_id=experience.prompt_id,
        prompt=experience.prompt,
        response=experience.response,
        reference=experience.reference,
        label=experience.label,
        reward=experience.reward,
        scores=experience.scores,
        length=len(ids),
        truncated=experience.truncated,
        advantage=float(advantages.mean()) if advantages is not None and len(advantages) else 0.0,
        token_ids=tuple(ids),
        tokens=tuple(token_texts(ids, decode)),
        engine_log_probs=_numbers(experience.engine_log_probs),
        trainer_log_probs=_numbers(behaviour),
        ratios=_numbers(ratios),
        advantages=_numbers(advantages),
        entropies=_numbers(experience.update_entropies),
        mask=() if all(mask) else mask,
        weights_version=experience.weights_version,
    )


def _numbers(values: Tensor | None) -> tuple[float, ...]:
    return () if values is None else tuple(values.tolist())


def finished_steps(config: RFTConfig, resumed: TrainerState | None) -> int | None:
    """Steps whose logs stay; -1: none, where the run begins again before its first step; None: a new run."""
    if resumed is not None:
        # The evaluation before the first step is made again.
        return resumed.step or -1
    return -1 if config.resume == "auto" else None


def drop_later_files(output_dir: Path, finished: int) -> None:
    """Remove rollouts, evaluations and memory entries of steps after `finished`: they are made again, perhaps by other
    ranks.
    """
    for folder in ("rollouts", "evaluation"):
        for file in sorted((output_dir / folder).glob("*.jsonl")):
            step = re.search(r"[-_](\d{6})(?:\.rank\d+)?\.jsonl$", file.name)
            if step is not None and int(step.group(1)) > finished:
                file.unlink()
    for file in sorted(output_dir.glob("memory.rank*.jsonl")):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        file.write_text("".join(line for line in lines if _is_finished(line, finished)), encoding="utf-8")


def _is_finished(line: str, finished: int) -> bool:
    """Whether a line is of a step up to `finished` or of the warm start; one that a kill has cut is of none."""
    try:
        entry = json.loads(line)
        return entry.get("phase") == WARM_START or int(entry["step"]) <= finished
    except ValueError:
        return False


def write_config(config: RFTConfig) -> None:
    """The resolved configuration beside the run's files, which `--config` reads again."""
    (config.output_dir / RUN_MARKER).write_text(json.dumps(config.as_dict(), indent=1), encoding="utf-8")


def make_loggers(config: RFTConfig, finished: int | None) -> list[MetricLogger]:
    """The loggers of the configuration; its values are written beside the metrics. For the first rank alone."""
    write_config(config)
    loggers: list[MetricLogger] = [JsonlLogger(config.output_dir / "metrics.jsonl", resume_after=finished)]
    if config.tensorboard:
        loggers.append(TensorBoardLogger(config.output_dir / "tensorboard", resume_after=finished))
    if config.wandb_project is not None:
        loggers.append(
            WandbLogger(
                config.output_dir / "wandb",
                project=config.wandb_project,
                mode=config.wandb_mode,
                settings=config.as_dict(),
                resume_after=finished,
            )
        )
    return loggers
