"""The shapes of a model from its config.json alone: built on the meta device, no weights, no memory."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rft_trainer.errors import ConfigurationError
from rft_trainer.models import Critic
from rft_trainer.models.lora import AdapterConfig, add_adapters
from rft_trainer.optim import freeze_prefixes
from rft_trainer.strategy.fsdp import transformer_blocks


@dataclass(frozen=True)
class ParameterShape:
    """One distinct parameter; a tied one stands once. `block` is its transformer block, -1 for what is outside."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    block: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def shard_numel(self, ranks: int) -> int:
        """Elements of one rank's part when rows are dealt out in equal chunks, the last ones padded."""
        if not self.shape:
            return 1
        return math.ceil(self.shape[0] / ranks) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class ModelShapes:
    """What a model's memory follows from.

    buffer_bytes: of buffers that no rank shares with another.
    kv_heads: of keys, and as many of values.
    kv_numel_per_token: elements of the keys and values of one token.
    checkpoint_itemsize: bytes of an element in the checkpoint's dtype, which an engine takes over.
    """

    parameters: tuple[ParameterShape, ...]
    buffer_bytes: int
    hidden: int
    layers: int
    vocabulary: int
    intermediate: int
    kv_heads: int
    kv_numel_per_token: int
    checkpoint_itemsize: int

    @property
    def numel(self) -> int:
        """Distinct elements."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def trained_numel(self) -> int:
        """Distinct elements that are trained."""
        return sum(parameter.numel for parameter in self.parameters if parameter.trained)

    @property
    def blocks_under_gradient(self) -> int:
        """Blocks that gradients pass: those from the lowest trained parameter on, in the order of the forward pass."""
        first = next((place for place, p in enumerate(self.parameters) if p.trained), len(self.parameters))
        return len({p.block for p in self.parameters[first:] if p.block >= 0})

    @property
    def behind_blocks(self) -> tuple[ParameterShape, ...]:
        """What comes behind the last block: the last norm, and a head of its own."""
        last = max((place for place, p in enumerate(self.parameters) if p.block >= 0), default=-1)
        return self.parameters[last + 1 :]

    @cached_property
    def _block_numels(self) -> Mapping[int, int]:
        found: dict[int, int] = {}
        for parameter in self.parameters:
            found[parameter.block] = found.get(parameter.block, 0) + parameter.numel
        return found

    def block_numel(self, block: int) -> int:
        """Elements of one block; of what is outside the blocks for -1."""
        return self._block_numels.get(block, 0)

    @property
    def largest_block_numel(self) -> int:
        """Elements of the largest block, what a gather holds at once."""
        return max((numel for block, numel in self._block_numels.items() if block >= 0), default=0)


def read_config(pretrain: str) -> Any:
    """The configuration of a checkpoint folder; weights are not needed.

    Raises:
        ConfigurationError: none that transformers knows.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(Path(pretrain).expanduser()))
    except (OSError, ValueError, KeyError) as error:
        problem = f"model folder {pretrain!r}: no config.json can be read ({_first_line(error)})"
        raise ConfigurationError(problem) from error


def model_shapes(
    config: Any, *, freeze: tuple[str, ...] = (), adapters: AdapterConfig | None = None, critic: bool = False
) -> ModelShapes:
    """Shapes of the causal model that a Hugging Face configuration describes.

    Args:
        config: of the checkpoint.
        freeze: prefixes that stay fixed.
        adapters: what is trained in their place.
        critic: the body with one number per token in place of the vocabulary.

    Raises:
        ConfigurationError: no causal model can be made from it.
    """
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            model: nn.Module = make(config)
            if critic:
                model = Critic(model)
            freeze_prefixes(model, freeze)
            if adapters is not None:
                model = add_adapters(model, adapters)
    except (ValueError, KeyError) as error:
        problem = f"no causal model can be made from {type(config).__name__} ({_first_line(error)})"
        raise ConfigurationError(problem) from error
    return _shapes_of(model, config)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _shapes_of(model: nn.Module, config: Any) -> ModelShapes:
    block_of = {
        id(parameter): number
        for number, block in enumerate(transformer_blocks(model))
        for parameter in block.parameters()
    }
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dtype = getattr(config, "dtype", None) or torch.float32
    return ModelShapes(
        parameters=tuple(
            ParameterShape(name, tuple(p.shape), p.requires_grad, block_of.get(id(p), -1))
            for name, p in model.named_parameters()
        ),
        buffer_bytes=_bytes(model.buffers()),
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        kv_heads=heads,
        kv_numel_per_token=2 * text.num_hidden_layers * heads * head_dim,
        checkpoint_itemsize=dtype.itemsize,
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())
