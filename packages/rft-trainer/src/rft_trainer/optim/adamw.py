"""AdamW with the usual parameter groups, and frozen prefixes that must match something."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import AdamW

from rft_trainer.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Numbers of AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2).

    Attributes:
        lr: learning rate after warm-up.
        betas: decay of both averages. The second is 0.95, not torch's 0.999: rewards drift over a run.
        eps: added to the root of the second average.
        weight_decay: of matrices; vectors (biases, norms) and embeddings named in `no_decay` get none.
        no_decay: substrings of names that get no weight decay either.
        fused: one kernel for all tensors; None lets torch choose by device.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ()
    fused: bool | None = None

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ConfigurationError(f"lr must not be negative, got {self.lr}; 0 freezes the weights")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigurationError(f"betas must lie in [0, 1), got {self.betas}")
        if self.eps <= 0 or self.weight_decay < 0:
            raise ConfigurationError(
                f"eps must be positive and weight_decay not negative, got eps {self.eps}, "
                f"weight_decay {self.weight_decay}"
            )


def freeze_prefixes(module: nn.Module, prefixes: Sequence[str]) -> list[str]:
    """Switch off the gradient of all parameters whose name begins with a prefix; do it before the module is sharded.

    A prefix ends at a dot or at the end of a name: "model.layers.1" does not match "model.layers.10.weight".

    Returns:
        The names that were frozen, in the module's order.

    Raises:
        ConfigurationError: a prefix matches no parameter, or nothing is left to train.
    """
    names = [name for name, _ in module.named_parameters()]
    for prefix in prefixes:
        if not any(_begins(name, prefix) for name in names):
            raise ConfigurationError(
                f"freeze prefix {prefix!r} matches no parameter; names begin with {', '.join(_first_parts(names))}"
            )
    frozen = [name for name in names if any(_begins(name, prefix) for prefix in prefixes)]
    parameters = dict(module.named_parameters())
    for name in frozen:
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigurationError(f"freeze prefixes {list(prefixes)} leave no parameter to train")
    return frozen


def _begins(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix.rstrip(".") + ".")


def _first_parts(names: Iterable[str]) -> list[str]:
    return sorted({".".join(name.split(".")[:3]) for name in names})[:12]


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: AdamWConfig
) -> list[dict[str, object]]:
    """Groups for an optimiser: with and without weight decay, trainable parameters only, empty groups left out.

    Works on sharded parameters as long as their global shape has its full number of dimensions.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            is_plain = parameter.dim() < 2 or any(part in name for part in config.no_decay)
            (plain if is_plain else decayed).append(parameter)
    groups: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_adamw(module: nn.Module, config: AdamWConfig) -> AdamW:
    """AdamW over the trainable parameters of `module`.

    Raises:
        ConfigurationError: the module has no trainable parameter.
    """
    groups = parameter_groups(module.named_parameters(), config)
    if not groups:
        raise ConfigurationError("the module has no trainable parameter; freeze fewer prefixes")
    fused = config.fused
    if fused is None:
        first = next(parameter for parameter in module.parameters() if parameter.requires_grad)
        fused = first.device.type == "cuda" and torch.is_floating_point(first)
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def begin_state(optimizer: AdamW) -> None:
    """Give every parameter that was never stepped the state that its first step begins with: no steps, both averages 0.

    Torch's checkpoint functions make a missing state by a step without gradient, and that step would be counted.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            # A fused or capturable optimiser counts its steps on the device.
            counts_there = group["fused"] or group["capturable"]
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device if counts_there else "cpu"),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
