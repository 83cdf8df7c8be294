"""The models beside the actor that a configuration asks for: the critic of PPO, the teacher of distillation."""

from typing import Any

from torch import nn

from rft_trainer.algorithms import AdvantageEstimator
from rft_trainer.config import RFTConfig
from rft_trainer.models import Actor, Critic, checkpoint_folder, load_causal_model
from rft_trainer.strategy import Strategy, TrainState


def scoring_options(config: RFTConfig) -> dict[str, Any]:
    """What an `Actor` must be given, so that it scores the distribution that rollouts are sampled from."""
    names = ("temperature", "top_p", "top_k", "first_token_temperature")
    return {name: getattr(config, name) for name in names}


def prepare_critic(config: RFTConfig, strategy: Strategy, model_folder: str) -> TrainState | None:
    """The critic with an optimiser of its own, from `critic_pretrain` or else `model_folder`; None without one.

    Collective over the world.
    """
    if not AdvantageEstimator.get(config.advantage_estimator).needs_critic:
        return None
    folder = model_folder if config.critic_pretrain is None else checkpoint_folder(config.critic_pretrain)
    critic = Critic(load_causal_model(folder))
    if config.gradient_checkpointing:
        critic.checkpoint_activations()
    return strategy.prepare(critic, config.critic_optimizer())


def prepare_teacher(config: RFTConfig, strategy: Strategy) -> nn.Module | None:
    """The frozen teacher, scored as the actor is; None without one. Collective over the world."""
    if config.teacher is None:
        return None
    model = load_causal_model(checkpoint_folder(config.teacher))
    return strategy.prepare_frozen(Actor(model, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k))
