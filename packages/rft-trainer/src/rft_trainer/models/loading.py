"""Models and tokenizers from a Hugging Face folder or hub id, with errors that say what is missing."""

import json
from pathlib import Path
from typing import Any

import torch

from rft_trainer.errors import ConfigurationError
from rft_trainer.models.deferred import deferred_causal_model

_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


def check_model_folder(pretrain: str) -> None:
    """Raise ConfigurationError when `pretrain` is a path that holds no model; hub ids are left to transformers."""
    path = Path(pretrain)
    looks_like_path = pretrain.startswith((".", "/", "~")) or path.exists()
    if not looks_like_path:
        return
    if not path.expanduser().is_dir():
        raise ConfigurationError(f"pretrain is {pretrain!r}: no such folder; give a Hugging Face model folder")
    folder = path.expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"pretrain is {pretrain!r}: no config.json there; give a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise ConfigurationError(
            f"pretrain is {pretrain!r}: no *.safetensors there; save the model with save_pretrained first"
        )
    _check_json(folder / "config.json")


def checkpoint_folder(pretrain: str, *, cache_dir: Path | None = None) -> str:
    """The local folder of a checkpoint: `pretrain` itself, or the snapshot of a hub id, fetched when it is not cached.

    Raises:
        ConfigurationError: the folder holds no model, or the hub id can neither be fetched nor found in the cache.
    """
    check_model_folder(pretrain)
    if Path(pretrain).expanduser().is_dir():
        return str(Path(pretrain).expanduser())
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return str(snapshot_download(pretrain, allow_patterns=list(_HUB_FILES), cache_dir=cache_dir))
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        raise ConfigurationError(
            f"pretrain is {pretrain!r}: no folder, and the model hub does not give it ({_first_line(error)}); "
            "give a Hugging Face model folder, such as OUTPUT_DIR/model of a run, or the id of a model that this "
            "machine can reach; a name of an app's own is known to that app's commands"
        ) from error


def _check_json(file: Path) -> None:
    try:
        json.loads(file.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{file}: not valid JSON ({error}); save the model again") from error


def quieten_transformers() -> None:
    """Keep transformers' progress bars off the terminal, where the run has its own."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def load_tokenizer(pretrain: str) -> Any:
    """The tokenizer of a checkpoint, with a pad token.

    Raises:
        ConfigurationError: no tokenizer, no chat template or no end-of-sequence token there.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(pretrain)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"pretrain is {pretrain!r}: no tokenizer could be read there ({_first_line(error)}); "
            "save the tokenizer beside the model"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(f"pretrain is {pretrain!r}: its tokenizer has no end-of-sequence token; set eos_token")
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigurationError(
            f"pretrain is {pretrain!r}: its tokenizer has no chat template; use an instruction model, "
            "or add chat_template.jinja to the folder"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_model(pretrain: str, *, dtype: torch.dtype = torch.float32, deferred: bool = False) -> Any:
    """A causal language model on the CPU in `dtype`.

    Args:
        pretrain: folder or hub id.
        dtype: of the parameters.
        deferred: leave the weights in their files until the model is sharded, where the checkpoint allows it
            (`rft_trainer.models.deferred`). Only FSDPBackend takes such a model.

    Raises:
        ConfigurationError: the folder or hub id holds no causal model that transformers can read.
    """
    from transformers import AutoModelForCausalLM

    check_model_folder(pretrain)
    folder = Path(pretrain).expanduser()
    try:
        model = deferred_causal_model(folder, dtype=dtype) if deferred and folder.is_dir() else None
        if model is not None:
            return model
        return AutoModelForCausalLM.from_pretrained(pretrain, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"pretrain is {pretrain!r}: no causal model could be read there ({_first_line(error)})"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
