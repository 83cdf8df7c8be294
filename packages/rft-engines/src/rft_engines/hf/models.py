"""What the embedded engine must know of a model."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from rft_engines.errors import EngineStartError, UnsupportedCombinationError

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def require_positive(**limits: int) -> None:
    """Raise ValueError for a limit below 1."""
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"HFEngine {name}={value}: give at least 1")


def context_length(text_config: Any, wanted: int | None) -> int | None:
    """Most tokens of prompt and response: what is wanted, else the model's positions, None when unlimited.

    Raises:
        ValueError: more than the model has positions.
    """
    limit: int | None = getattr(text_config, "max_position_embeddings", None)
    if wanted is None:
        return limit
    if wanted < 1 or (limit is not None and wanted > limit):
        raise ValueError(f"HFEngine max_model_len={wanted}: the model has {limit} positions, give 1 to {limit}")
    return wanted


def cache_bytes_per_token(text_config: Any, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes over all layers."""
    heads = text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    return 2 * int(text_config.num_hidden_layers) * int(kv_heads) * int(head_dim) * dtype.itemsize


def refuse_stateful(model: Any) -> None:
    """Refuse models that carry other state than keys and values from token to token.

    Raises:
        UnsupportedCombinationError: names the model and its layers, or what is no model of transformers.
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise UnsupportedCombinationError(
            f"engine 'hf' and a {type(model).__name__}: give a causal model of transformers, or the folder of one"
        )
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_LAYERS
    if kinds or getattr(model, "_is_stateful", False) or model.config.is_encoder_decoder:
        raise UnsupportedCombinationError(
            f"engine 'hf' and {type(model).__name__} (layers {sorted(kinds) or 'with recurrent or encoder state'}): "
            f"the embedded engine caches keys and values of attention only, use the vLLM or SGLang engine"
        )


def load_model(folder: Path, tokenizer: Any, dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
    """Model and tokenizer (None when there is none) of a saved folder, never from the network.

    Raises:
        EngineStartError: no config.json there.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise EngineStartError(f"no config.json in {str(folder)!r}: give the folder of a saved transformers model")
    sees = hasattr(AutoConfig.from_pretrained(folder, local_files_only=True), "vision_config")
    auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype="auto" if dtype is None else dtype, local_files_only=True)
    if tokenizer is None and any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model, tokenizer
