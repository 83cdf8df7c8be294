"""Length, files and seed of the run."""

from dataclasses import dataclass
from pathlib import Path

from rft_trainer.config.ranges import below


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Length, files and seed of the run."""

    output_dir: Path = Path("runs/default")
    """Everything the run writes."""
    overwrite: bool = False
    """Allow an output folder that already holds a run: the old run is deleted."""
    max_steps: int = 10
    """Rollout and update rounds."""
    eval_steps: int = 0
    """Evaluate every so many steps besides before and after; 0: only those two."""
    save_steps: int = 0
    """Checkpoint every so many steps; 0: only at the end."""
    resume_from: Path | None = None
    """A checkpoint folder to continue from."""
    seed: int = 0
    """Seed of weights, data order and sampling."""
    tensorboard: bool = True
    """Write TensorBoard events beside the JSONL."""
    rollouts_max_mib: float = 64.0
    """Bytes of rollouts that are kept for reading, in MiB."""

    def _run_problems(self) -> list[str]:
        return below(self, 1, "max_steps") + below(self, 0, "eval_steps", "save_steps", "seed", "rollouts_max_mib")
