"""Checkpoints that are complete or absent: temporary folder, manifest with sizes and hashes, one rename."""

from rft_trainer.checkpoint.manifest import MANIFEST, Manifest, TrainerState, read_manifest
from rft_trainer.checkpoint.resume import find_checkpoint, fitted_settings, resolve_resume
from rft_trainer.checkpoint.retention import RetentionPolicy
from rft_trainer.checkpoint.store import BEST, LATEST, CheckpointStore

__all__ = [
    "BEST",
    "LATEST",
    "MANIFEST",
    "CheckpointStore",
    "Manifest",
    "RetentionPolicy",
    "TrainerState",
    "find_checkpoint",
    "fitted_settings",
    "read_manifest",
    "resolve_resume",
]
