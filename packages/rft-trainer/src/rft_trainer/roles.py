"""The models of a run by role: the trained policy, the reference that anchors it, PPO's critic, a teacher.

The engine's configuration is made here, too.
"""

import json
from typing import Any

import torch
from torch import nn

from rft_engines import EngineConfig
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


def engine_config(config: RFTConfig, folder: str) -> EngineConfig:
    """The rollout engine's part of the configuration.

    Args:
        config: the run's settings.
        folder: checkpoint whose shapes and tokenizer the engine takes.
    """
    return EngineConfig(
        kind=config.engine_type,
        model_path=folder,
        tp_size=config.engine_tp_size,
        max_model_len=config.prompt_max_len + max(config.generate_max_len, config.eval_max_len or 0),
        memory_utilization=config.engine_mem_util,
        kv_cache_bytes=config.engine_kv_bytes,
        enable_sleep=config.enable_engine_sleep,
        lora_rank=config.lora_rank if config.sends_adapter_only else 0,
        # The first weight sync fills the engine before the first generation.
        load_weights=config.engine_type == "hf",
        options=json.loads(config.engine_options or "{}"),
    )
