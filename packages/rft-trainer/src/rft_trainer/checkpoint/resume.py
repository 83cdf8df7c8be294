"""Which checkpoint a run continues from, and which settings it must share with it."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rft_trainer.checkpoint.manifest import Manifest
from rft_trainer.checkpoint.store import LATEST, complete_checkpoints, replaced_folder
from rft_trainer.config import RFTConfig
from rft_trainer.config.data import DataOptions
from rft_trainer.config.distribution import DistributionOptions
from rft_trainer.config.evaluation import EvaluationOptions
from rft_trainer.config.plan import PlanOptions
from rft_trainer.config.residency import ResidencyOptions
from rft_trainer.config.rollout import RolloutOptions
from rft_trainer.config.run import RunOptions
from rft_trainer.config.warm_start import WarmStartOptions
from rft_trainer.errors import CheckpointError

# Groups of settings in which a resumed run may differ; what is new elsewhere must fit until it is known to be free.
_CHANGEABLE = (
    RunOptions,
    RolloutOptions,
    ResidencyOptions,
    PlanOptions,
    DistributionOptions,
    EvaluationOptions,
    DataOptions,
    # What it taught is in the weights of the checkpoint.
    WarmStartOptions,
)
# How the work is cut and laid out, and when a run warns or stops: they change no result.
_FREE = frozenset(
    {
        "micro_train_batch_size",
        "max_tokens_per_micro_batch",
        "padding_side",
        "packing",
        "replay_on_device",
        "gap_warn",
        "gap_stop",
    }
)
_OTHERS = ("rollout_batch_size", "n_samples_per_prompt", "seed")


def find_checkpoint(root: Path) -> Path | None:
    """The checkpoint to continue from: what `latest` names, else the complete one of the highest step, else None."""
    latest = root / LATEST
    candidates = complete_checkpoints(root)[::-1]
    if latest.is_file():
        name = latest.read_text(encoding="utf-8", errors="replace").strip()
        # A kill between the two renames of a checkpoint that is written again leaves the old one under this name.
        candidates = [root / name, replaced_folder(root / name), *candidates]
    return next((folder for folder in candidates if _is_complete(folder)), None)


def _is_complete(folder: Path) -> bool:
    try:
        Manifest.read(folder)
    except CheckpointError:
        return False
    return True


def resolve_resume(config: RFTConfig) -> RFTConfig:
    """`resume auto` as the checkpoint to continue from, if the output folder holds one; every rank finds the same.

    The run's own newest checkpoint goes before `resume_from`, which is where the run began: its config.json may name an
    older one of its own, which a resume has passed since.
    """
    if config.resume != "auto":
        return config
    newest = find_checkpoint(config.output_dir / "checkpoints")
    return config if newest is None else replace(config, resume_from=newest)


def fitted_settings(config: RFTConfig, model: str) -> dict[str, Any]:
    """Settings that a resumed run must share: optimiser, adapters, algorithm, rewards, group and batch, seed, model.

    `model` describes names and shapes of the weights. `max_steps` counts where it shapes the learning rate.
    """
    names = [item.name for group in RFTConfig.__bases__ if group not in _CHANGEABLE for item in fields(group)]
    chosen = [name for name in (*names, *_OTHERS) if name not in _FREE]
    if config.lr_scheduler != "constant":
        chosen.append("max_steps")
    values = config.as_dict()
    return {**{name: values[name] for name in chosen}, "model": model}
