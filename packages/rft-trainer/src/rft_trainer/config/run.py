"""Length, files and seed of the run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rft_trainer.config.ranges import below


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Length, files and seed of the run."""

    output_dir: Path = Path("runs/default")
    """Everything the run writes."""
    overwrite: bool = False
    """Allow an output folder that already holds a run: the old run is deleted."""
    max_steps: int = 10
    """Rollout and update rounds; 0: none, the model is evaluated and exported as it is."""
    max_seconds: float | None = None
    """No round begins that would, with the evaluation behind it, end later than so many seconds after the start."""
    save_steps: int = 0
    """Checkpoint every so many steps; 0: only at the end."""
    resume: Literal["off", "auto"] = "off"
    """auto: continue from the newest complete checkpoint in output_dir; without one begin there, from resume_from."""
    resume_from: Path | None = None
    """A checkpoint folder to continue from."""
    save_in_background: bool = False
    """Write checkpoints while training goes on; costs one copy of the training state in host memory."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What follows a checkpoint that could not be written, such as on a full disk; earlier ones stay."""
    save_on_interrupt: bool = True
    """Ctrl-C or SIGTERM: write a checkpoint after the step that is going on, then end."""
    max_checkpoints: int = 0
    """Checkpoints that are kept; 0: all. The newest and the best are never removed."""
    max_checkpoints_gib: float = 0.0
    """Space for checkpoints in GiB; 0: no limit. The newest and the best are never removed."""
    best_metric: str | None = None
    """Evaluation metric whose best checkpoint is kept and named in checkpoints/best, such as eval/accuracy."""
    best_metric_lowest: bool = False
    """The smallest value of best_metric is the best."""
    seed: int = 0
    """Seed of weights, data order and sampling."""
    tensorboard: bool = True
    """Write TensorBoard events beside the JSONL."""
    wandb_project: str | None = None
    """Log to this project of wandb too (extra wandb)."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """offline: wandb writes to output_dir/wandb, for `wandb sync` later."""
    rollouts_max_mib: float = 64.0
    """Bytes of rollouts that are kept for reading, over all ranks and steps, in MiB."""

    def _run_problems(self) -> list[str]:
        problems = below(
            self, 0, "max_steps", "save_steps", "seed", "rollouts_max_mib", "max_checkpoints", "max_checkpoints_gib"
        )
        if self.max_seconds is not None and not self.max_seconds > 0:
            problems.append(f"max_seconds is {self.max_seconds}: give more than 0, or leave it out")
        return problems
