"""Low-rank adapters on a causal model, and the model below them (LoRA, arXiv:2106.09685)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from rft_trainer.errors import ConfigurationError, UnsupportedCombination
from rft_trainer.models.deferred import placeholders

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """How adapters are made.

    Attributes:
        rank: columns of A and rows of B.
        alpha: the product B @ A is scaled by alpha / rank.
        targets: names of layers, or `all-linear` alone.
        seed: of the random start of A, so that every rank of every run size begins alike; B begins at 0.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    seed: int = 0


def add_adapters(model: nn.Module, config: AdapterConfig) -> nn.Module:
    """`model` with adapters in it; only they are trainable, in fp32. Before the model is sharded.

    There is no dropout: the ratio of an on-policy token must be 1.

    Raises:
        ConfigurationError: the extra is missing, or a target matches no linear layer.
        UnsupportedCombination: a target is the output layer.
    """
    _check_targets(model, config.targets)
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as missing:
        raise ConfigurationError(
            "LoRA needs the extra 'lora': `pip install 'rft-trainer[lora]'`, or leave out --lora_rank"
        ) from missing
    targets = config.targets[0] if config.targets == (ALL_LINEAR,) else list(config.targets)
    settings: Any = LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    # PEFT puts adapters where the weights below are, and on the meta device they would lose their first values.
    with torch.random.fork_rng(devices=[]), placeholders(model):
        torch.manual_seed(config.seed)
        return cast(nn.Module, get_peft_model(model, settings))


def _check_targets(model: Any, targets: tuple[str, ...]) -> None:
    """Each target must match a linear layer, and none the output layer."""
    if targets == (ALL_LINEAR,):
        return
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    matches = {t: [(n, m) for n, m in linear if n == t or n.endswith(f".{t}")] for t in targets}
    unmatched = [target for target, found in matches.items() if not found]
    if unmatched:
        known = sorted({name.rpartition(".")[2] for name, _ in linear})
        raise ConfigurationError(f"lora_targets {unmatched} match no linear layer; there are {', '.join(known)}")
    head = model.get_output_embeddings()
    if any(module is head for found in matches.values() for _, module in found):
        raise UnsupportedCombination(
            f"adapters on the output layer (lora_targets {list(targets)}) and chunked log-probabilities: "
            "leave the output layer out of --lora_targets"
        )


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without its adapters inside. No communication; what is trainable stays as it is.

    PEFT's own context also switches `requires_grad`, and FSDP2 keeps what it finds at its first gather.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer._disable_adapters = value


class WithoutAdapters(nn.Module):
    """The reference of a LoRA actor: the same weights with the adapters off; holds none of its own.

    Args:
        module: the actor as its backend wraps it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the actor gives, without its adapters."""
        with adapters_off(self.module):
            return self.module(*args, **kwargs)
