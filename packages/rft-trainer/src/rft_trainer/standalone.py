"""What the commands beside training share: a process without torchrun, and an actor from a checkpoint."""

import os
import socket
from pathlib import Path

from rft_dist import TorchrunEnvironment
from rft_trainer.checkpoint import CheckpointStore
from rft_trainer.config import RFTConfig
from rft_trainer.models import checkpoint_folder
from rft_trainer.roles import build_policy
from rft_trainer.strategy import Strategy, TrainState
from rft_trainer.trainer.averaging import WeightAverage
from rft_trainer.warm_start import is_warm_started, starting_folder


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
    if config.resume_from is not None and is_warm_started(config):
        return starting_folder(config, config.pretrain)
    return checkpoint_folder(config.pretrain)


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
