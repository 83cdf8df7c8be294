"""The models of a run by role: the trained policy, the reference that anchors it, PPO's critic, a teacher."""

from typing import Any

import torch
from torch import nn

from rft_trainer.algorithms import AdvantageEstimator
from rft_trainer.config import RFTConfig
from rft_trainer.models import Actor, Critic, checkpoint_folder, load_causal_model
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


def prepare_critic(config: RFTConfig, strategy: Strategy, model_folder: str) -> TrainState | None:
    """The critic with an optimiser of its own, from `critic_pretrain` or else `model_folder`; None without one.

    Collective over the world.
    """
    if not AdvantageEstimator.get(config.advantage_estimator).needs_critic:
        return None
    folder = model_folder if config.critic_pretrain is None else checkpoint_folder(config.critic_pretrain)
    critic = Critic(load_causal_model(folder, deferred=config.fsdp))
    if config.gradient_checkpointing:
        critic.checkpoint_activations()
    return strategy.prepare(critic, config.critic_optimizer(), role="critic")


def prepare_teacher(config: RFTConfig, strategy: Strategy) -> nn.Module | None:
    """The frozen teacher, scored as the actor is; None without one. Collective over the world."""
    if config.teacher is None:
        return None
    return strategy.prepare_frozen(_scorer(config, checkpoint_folder(config.teacher), torch.float32), role="teacher")


def scoring_options(config: RFTConfig) -> dict[str, Any]:
    """What an `Actor` must be given, so that it scores the distribution that rollouts are sampled from."""
    names = ("temperature", "top_p", "top_k", "first_token_temperature")
    return {name: getattr(config, name) for name in names}


def _scorer(config: RFTConfig, folder: str, dtype: torch.dtype) -> Actor:
    # ZeRO cuts up what is there; FSDP2 reads each block when it shards it.
    return Actor(load_causal_model(folder, dtype=dtype, deferred=config.fsdp), **scoring_options(config))
