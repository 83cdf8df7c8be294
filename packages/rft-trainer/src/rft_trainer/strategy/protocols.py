"""Narrow protocols between the trainer and the machinery of a backend."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rft_trainer.config import OptimizerConfig


@dataclass(frozen=True)
class Move:
    """One finished move: `direction` is offload or reload; seconds are those of the copies."""

    owner: str
    direction: str
    nbytes: int
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """In 1e9 bytes; 0 when nothing moved."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


class Movable(Protocol):
    """The memory of one owner, on the device or on the host. No method communicates."""

    owner: str

    @property
    def on_host(self) -> bool:
        """Whether it was offloaded and not brought back in full."""
        ...

    def offload(self) -> None:
        """To the host; a second call does nothing."""

    def reload(self) -> None:
        """To the device; a second call does nothing, one after a failure continues."""

    def require(self, call: str) -> None:
        """Raise ResidencyError, naming `call`, while it is on the host."""

    def take_moves(self) -> list[Move]:
        """The moves since the last call."""
        ...

    def nbytes(self) -> int:
        """Bytes on the device now."""
        ...


@dataclass(frozen=True)
class StateMemory:
    """Where a trained state is: `model` is parameters, gradients and buffers, `optimizer` what the optimiser keeps."""

    model: Movable
    optimizer: Movable


@dataclass
class TrainState:
    """A model under training, as its backend wraps it.

    module: what is called; a DeepSpeedEngine or an FSDP2 module.
    network: the Actor with the parameters (sharded ones under FSDP2 and ZeRO-3).
    optimizer: the object whose `param_groups` hold the learning rate.
    scheduler: steps once for each optimiser step that was not skipped.
    """

    module: nn.Module
    network: nn.Module
    optimizer: Any
    scheduler: Any
    config: OptimizerConfig
    memory: StateMemory
    release_gathered: Callable[[], None]
    """Frees whole copies of parameters that a forward without backward leaves behind. No communication."""

    @property
    def checkpoint_module(self) -> nn.Module:
        """The Hugging Face model inside the Actor."""
        return self.network.get_submodule("model")


@dataclass(frozen=True)
class StepReport:
    """One optimiser step: global gradient norm before clipping, the rate it used, whether it was skipped."""

    grad_norm: float
    learning_rate: float
    skipped: bool


class TrainingBackend(Protocol):
    """Wrapping, backward, optimiser step and sharded state of one backend."""

    name: str
    resizable: bool
    """A checkpoint can be read by another number of ranks."""

    def prepare(self, model: nn.Module, config: OptimizerConfig, *, role: str = "actor") -> TrainState:
        """Wrap a model and build its optimiser; `role` names it in messages. Collective over the world."""

    def prepare_frozen(self, model: nn.Module, *, role: str = "reference") -> nn.Module:
        """Wrap a model that is only scored. Collective over the world."""

    def release(self, state: TrainState) -> None:
        """End the training of `state`, of which nothing may be used afterwards. No communication.

        Its memory goes with the last reference to it.
        """

    def backward(self, state: TrainState, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`; gradients are summed over ranks and calls. Collective over the world."""

    def optimizer_step(self, state: TrainState) -> StepReport:
        """Clip, step, schedule and clear; skipped on all ranks if any gradient is not finite. Collective."""

    def save(self, state: TrainState, folder: Path, *, background: bool = False) -> Future[Any] | None:
        """Write this rank's shard of model, optimiser and scheduler. Collective over the world.

        With `background` the shard is copied to the host and written meanwhile; the future is done when it is on disk.
        """

    def load(self, state: TrainState, folder: Path) -> None:
        """Read what `save` wrote. Collective over the world."""


class Residency(Protocol):
    """Moves a model or its optimiser state between the device and the host; on a CPU only the states change.

    A model is a trained state or what `prepare_frozen` returned. Nothing here communicates.
    """

    def offload_model(self, model: TrainState | nn.Module) -> None:
        """Parameters, gradients and buffers to the host."""

    def reload_model(self, model: TrainState | nn.Module) -> None:
        """Parameters, gradients and buffers back to the device."""

    def offload_optimizer(self, state: TrainState) -> None:
        """Optimiser state to the host."""

    def load_optimizer(self, state: TrainState) -> None:
        """Optimiser state back to the device; `optimizer_step` does it by itself."""


class DataParallel(Protocol):
    """The collectives that training needs over the ranks that hold different data."""

    rank: int
    size: int
    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks. Collective over the data group."""

    def reduce_metrics(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """One fused reduction of named metrics. Collective over the data group."""

    def micro_batches(self, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Indices by micro-batch, the same number on every rank. Collective over the data group."""

    def most(self, value: int) -> int:
        """Largest value over the ranks. Collective over the data group."""

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The integers of each rank, however many it has. Collective over the data group."""

    def on_main(self, action: Callable[[], None]) -> None:
        """Run on rank 0; its error is raised on every rank. Collective over the data group."""

    def together(self, error: BaseException | None) -> None:
        """Raise the first rank's error on all ranks, if any rank has one. Collective over the data group."""


class RolloutRuntime(Protocol):
    """Generation with weights whose version is known."""

    @property
    def weights_version(self) -> int:
        """Finished weight updates of the engine."""
        ...

    @property
    def weight_lag(self) -> int | None:
        """Optimiser steps since the last sync; None before the first one."""
        ...

    def generate(self, requests: Sequence[Any], sampling: Any) -> list[Any]:
        """Generations in order, n for each request. Collective over the rollout group."""

    def update_engine_weights(self, state: TrainState) -> Any:
        """Send the actor's weights; returns the SyncReport. Collective over the world."""

    def resume(self, version: int) -> None:
        """Give the next sync this version."""

    def awake(self) -> AbstractContextManager[None]:
        """Engine ready to generate inside; asleep afterwards, with its weights kept, if it slept before."""
