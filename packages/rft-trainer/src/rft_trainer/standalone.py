"""What the commands beside training share: a process without torchrun, and an actor from a checkpoint."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rft_dist import TorchrunEnvironment
from rft_rewards import RewardComputationEngine
from rft_trainer.checkpoint import CheckpointStore, TrainerState, fitted_settings
from rft_trainer.cli import Recipe
from rft_trainer.config import RFTConfig
from rft_trainer.data import EncodedPrompt
from rft_trainer.errors import ConfigurationError
from rft_trainer.models import checkpoint_folder, load_causal_model
from rft_trainer.optim import freeze_prefixes
from rft_trainer.roles import build_policy, prepare_critic
from rft_trainer.strategy import Strategy, TrainState
from rft_trainer.trainer.averaging import WeightAverage
from rft_trainer.trainer.ppo import CRITIC_FOLDER
from rft_trainer.warm_start import warm_started_folder


@dataclass(frozen=True, kw_only=True)
class AppParts:
    """What an app lends to the commands, so that they know what its own runs know.

    Attributes:
        recipes: named configurations, as for the app's own flags.
        resolve: the configuration with the folder of a model that the app has a name for.
        held_out: the sets that are evaluated, by name.
        rewards: what scores a response.
    """

    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    resolve: Callable[[RFTConfig], RFTConfig] = lambda config: config
    held_out: Callable[[RFTConfig, Any], Mapping[str, Sequence[EncodedPrompt]]]
    rewards: Callable[[], RewardComputationEngine]


def one_process_without_torchrun() -> None:
    """Set what torchrun would, for a run of one process; under torchrun only check it."""
    if "WORLD_SIZE" in os.environ:
        TorchrunEnvironment.from_environ()
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def initial_folder(config: RFTConfig) -> str:
    """The local folder of the model that a checkpoint's run began with: its warm start, else `pretrain`.

    A checkpoint holds what was trained; frozen weights and those under adapters are read from here.

    Raises:
        ConfigurationError: there is no model.
    """
    assert config.pretrain is not None
    return warm_started_folder(config) or checkpoint_folder(config.pretrain)


def checkpointed_actor(config: RFTConfig, strategy: Strategy, folder: str) -> tuple[TrainState, int]:
    """The actor of `resume_from` and its step; without one, that of the model folder, and 0. Collective over the world.

    With `ema_decay` it has the moving average of its weights, as in the evaluations and the export of the run; that is
    read by the run's number of ranks. `ema_decay` 0 takes the weights themselves.

    Raises:
        CheckpointError: on all ranks, when the checkpoint is damaged or of another model or strategy.
    """
    actor = strategy.prepare(build_policy(config, folder, bf16=strategy.bf16))
    if config.resume_from is None:
        return actor, 0
    average = WeightAverage(actor, config.ema_decay) if config.ema_decay > 0 else None

    def load(shards: Path) -> None:
        strategy.load_checkpoint(actor, shards)
        if average is not None:
            average.load(shards, strategy.data.rank)
            average.put()

    # A store of another folder: reading for a look must not make this checkpoint the run's latest.
    state = CheckpointStore(config.output_dir / "elsewhere", strategy.data).load(
        config.resume_from,
        load,
        strategy=strategy.backend.name,
        resizable=strategy.backend.resizable and average is None,
        settings={"model": strategy.model_form(actor)},
    )
    return actor, state.step


def check_model_fits(config: RFTConfig, folder: str, weights: str) -> None:
    """A checkpoint can hold what the model `weights` has and the model `folder` has not. No communication.

    Raises:
        ConfigurationError: other names or shapes, a frozen weight that differs, or adapters, which alone would be held.
    """
    if config.lora_rank:
        raise ConfigurationError(
            f"from_model is {weights!r} and lora_rank is {config.lora_rank}: a checkpoint of adapters holds no weights "
            "of a model; give the model by --pretrain"
        )
    if Path(folder).resolve() == Path(weights).resolve():
        return
    ours, theirs = load_causal_model(folder), load_causal_model(weights)
    known = {name: tuple(parameter.shape) for name, parameter in ours.named_parameters()}
    found = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
    other = sorted(name for name in known.keys() | found.keys() if known.get(name) != found.get(name))
    if other:
        first = other[0]
        raise ConfigurationError(
            f"from_model is {weights!r} and pretrain is {folder!r}: {len(other)} weights differ in name or shape, such "
            f"as {first}, {found.get(first, 'absent')} against {known.get(first, 'absent')}; give a model of one kind"
        )
    given = dict(theirs.named_parameters())
    fixed = freeze_prefixes(ours, config.freeze)
    changed = [name for name in fixed if not ours.get_parameter(name).equal(given[name])]
    if changed:
        raise ConfigurationError(
            f"from_model is {weights!r}: {len(changed)} weights that freeze keeps differ from those of pretrain "
            f"{folder!r}, such as {changed[0]}, and a checkpoint holds no frozen weights; give this model by --pretrain"
        )


def checkpoint_of_model(config: RFTConfig, strategy: Strategy, folder: str, weights: str) -> Path:
    """Write `checkpoints/step_000000` with the weights of the model folder `weights`. Collective over the world.

    Optimiser, schedule, critic and moving average are as they begin in a run whose `pretrain` is `folder`.

    Raises:
        CheckpointError: on all ranks, when one cannot write.
    """
    actor = strategy.prepare(build_policy(config, weights, bf16=strategy.bf16))
    average = WeightAverage(actor, config.ema_decay) if config.ema_decay > 0 else None
    critic = prepare_critic(config, strategy, folder)

    def write(shards: Path) -> tuple[()]:
        strategy.save_checkpoint(actor, shards)
        if critic is not None:
            strategy.save_checkpoint(critic, shards / CRITIC_FOLDER)
        if average is not None:
            average.save(shards, strategy.data.rank)
        return ()

    state = TrainerState(
        step=0,
        weights_version=1,  # of the first sync, before the first step
        world_size=strategy.data.size,
        strategy=strategy.backend.name,
        settings=fitted_settings(config, strategy.model_form(actor)),
    )
    return CheckpointStore(config.output_dir / "checkpoints", strategy.data).save(state, write)
