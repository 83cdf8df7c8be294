"""The models of a run by role: the policy that is trained, and the reference that anchors it."""

import torch
from torch import nn

from rft_trainer.config import RFTConfig
from rft_trainer.models import Actor, load_causal_model
from rft_trainer.models.lora import WithoutAdapters
from rft_trainer.strategy import Strategy, TrainState


def build_policy(config: RFTConfig, folder: str, *, bf16: bool) -> Actor:
    """The actor before its backend wraps it: frozen prefixes, adapters and recomputation as configured.

    Args:
        config: the run's settings.
        folder: the initial checkpoint.
        bf16: computation is in bfloat16. Weights under adapters are then held in it, since nothing trains them.
    """
    adapters = config.adapters(config.seed)
    dtype = torch.bfloat16 if bf16 and adapters is not None else torch.float32
    policy = _scorer(config, folder, dtype)
    policy.freeze(config.freeze)
    if adapters is not None:
        policy.add_adapters(adapters)
    if config.gradient_checkpointing:
        policy.checkpoint_activations()
    return policy


def build_initial_model(config: RFTConfig, folder: str, strategy: Strategy, actor: TrainState) -> nn.Module | None:
    """The reference: none without a KL term, the actor's own weights under its adapters with LoRA, else a second model.

    Collective over the world.
    """
    if config.init_kl_coef == 0:
        return None
    if config.lora_rank and not config.separate_reference:
        return WithoutAdapters(actor.module)
    return strategy.prepare_frozen(_scorer(config, folder, torch.float32))


def _scorer(config: RFTConfig, folder: str, dtype: torch.dtype) -> Actor:
    model = load_causal_model(folder, dtype=dtype)
    return Actor(model, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)
