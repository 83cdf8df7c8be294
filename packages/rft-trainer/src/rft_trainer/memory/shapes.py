"""The shapes of a model from its config.json alone: built on the meta device, no weights, no memory."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rft_trainer.errors import ConfigurationError
from rft_trainer.models.lora import AdapterConfig, add_adapters
from rft_trainer.optim import freeze_prefixes


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
    kv_bytes_per_token: of keys and values of one token in 16 bit.
    """

    parameters: tuple[ParameterShape, ...]
    buffer_bytes: int
    hidden: int
    layers: int
    vocabulary: int
    intermediate: int
    kv_bytes_per_token: int

    @property
    def numel(self) -> int:
        """Distinct elements."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def trained_numel(self) -> int:
        """Distinct elements that are trained."""
        return sum(parameter.numel for parameter in self.parameters if parameter.trained)

    def block_numel(self, block: int) -> int:
        """Elements of one block; of what is outside the blocks for -1."""
        return sum(parameter.numel for parameter in self.parameters if parameter.block == block)

    @property
    def largest_block_numel(self) -> int:
        """Elements of the largest block, what a gather holds at once."""
        return max((self.block_numel(block) for block in {p.block for p in self.parameters if p.block >= 0}), default=0)


def model_shapes(pretrain: str, *, freeze: tuple[str, ...] = (), adapters: AdapterConfig | None = None) -> ModelShapes:
    """Shapes of the causal model that `config.json` of the folder describes, with its frozen prefixes and adapters.

    Raises:
        ConfigurationError: the folder has no configuration that transformers knows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = AutoConfig.from_pretrained(str(Path(pretrain).expanduser()))
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            model: nn.Module = make(config)
            freeze_prefixes(model, freeze)
            if adapters is not None:
                model = add_adapters(model, adapters)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        problem = f"pretrain is {pretrain!r}: no model can be made from its config.json ({reason})"
        raise ConfigurationError(problem) from error
    return shapes_of(model, config)


def shapes_of(model: nn.Module, config: Any) -> ModelShapes:
    """Shapes of a model that exists."""
    from rft_trainer.strategy.fsdp import transformer_blocks

    block_of = {
        id(parameter): number
        for number, block in enumerate(transformer_blocks(model))
        for parameter in block.parameters()
    }
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
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
        kv_bytes_per_token=2 * 2 * text.num_hidden_layers * heads * head_dim,
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())
