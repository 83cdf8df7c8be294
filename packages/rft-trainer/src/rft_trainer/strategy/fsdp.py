"""FSDP2 training: `fully_shard` on the model's own blocks, AdamW on the local shards."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rft_trainer.config import OptimizerConfig
from rft_trainer.errors import CheckpointError
from rft_trainer.models.deferred import settle
from rft_trainer.optim import begin_state, build_adamw, build_schedule
from rft_trainer.strategy.protocols import Movable, StateMemory, StepReport, TrainState
from rft_trainer.strategy.residency import (
    OPTIMIZER_SUFFIX,
    MovableMemory,
    RoleMemory,
    Stationary,
    guard,
    module_tensors,
    optimizer_tensors,
    reload_state,
)


class FSDPBackend:
    """TrainingBackend and Residency on torch FSDP2.

    Args:
        device: of this rank.
        bf16: compute in bfloat16 with fp32 masters and fp32 gradient reduction.
        shard_size: ranks that share one copy; the world holds world / shard_size copies (HSDP). None: one copy.
        reshard: gathered blocks of trained models are given back after forward.
        cpu_offload: shards, gradients and optimiser of trained models live on the host.
    """

    name = "fsdp2"
    resizable = True

    def __init__(
        self,
        device: torch.device,
        *,
        bf16: bool = False,
        shard_size: int | None = None,
        reshard: bool = True,
        cpu_offload: bool = False,
    ) -> None:
        self._device = device
        self._policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if bf16
            else MixedPrecisionPolicy()
        )
        self._shard_size = shard_size
        self._reshard = reshard
        self._cpu_offload = cpu_offload
        self._mesh: DeviceMesh | None = None
        self._roles = RoleMemory()

    def prepare(self, model: nn.Module, config: OptimizerConfig, *, role: str = "actor") -> TrainState:
        """Shard and build the optimiser over the local shards. Collective over the world."""
        self._shard(model, trained=True)
        optimizer = build_adamw(model, config.adamw)
        schedule = build_schedule(optimizer, config.schedule)
        memory = StateMemory(
            self._memory(role, lambda: module_tensors(model), _reshard(model), trained=True),
            self._memory(role + OPTIMIZER_SUFFIX, lambda: optimizer_tensors(optimizer), lambda: None, trained=True),
        )
        guard(model, memory.model)
        return TrainState(model, model, optimizer, schedule, config, memory, release_gathered=_reshard(model))

    def prepare_frozen(self, model: nn.Module, *, role: str = "reference") -> nn.Module:
        """Shard a model that is only scored. Collective over the world."""
        model.requires_grad_(False).eval()
        self._shard(model, trained=False)
        self._roles.add_frozen(model, self._memory(role, lambda: module_tensors(model), _reshard(model), trained=False))
        return model

    def release(self, state: TrainState) -> None:
        """End the training of `state`: nothing outside it holds its memory. No communication."""
        state.optimizer.zero_grad(set_to_none=True)
        state.release_gathered()

    def _memory(
        self, owner: str, tensors: Callable[[], Iterable[Tensor]], before: Callable[[], None], *, trained: bool
    ) -> Movable:
        if trained and self._cpu_offload:
            return Stationary(owner, tensors, self._device)
        return MovableMemory(owner, tensors, self._device, before_offload=before)

    def _shard(self, model: nn.Module, *, trained: bool) -> None:
        mesh = self._shared_mesh()
        pinned = self._device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=pinned) if trained and self._cpu_offload else OffloadPolicy()
        common: dict[str, Any] = {"mesh": mesh, "mp_policy": self._policy, "offload_policy": offload}
        reshard = self._reshard or not trained
        for block in transformer_blocks(model):
            # One block at a time is whole on this rank, and only until it is sharded.
            settle(block, self._device)
            fully_shard(block, reshard_after_forward=reshard, **common)
        settle(model, self._device)
        # A root that will run backward keeps its weights for it; one that is only scored gives them back.
        fully_shard(model, reshard_after_forward=not trained, **common)

    def _shared_mesh(self) -> DeviceMesh:
        """One mesh for all models. Collective over the world at the first call."""
        if self._mesh is None:
            world = dist.get_world_size()
            size = self._shard_size or world
            shape, names = ((world,), ("dp",)) if size == world else ((world // size, size), ("copy", "dp"))
            self._mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=names)
        return self._mesh

    def _global_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Norm over all shards, wherever they lie. Collective over the ranks of one copy."""
        shards = [cast(DTensor, p.grad).to_local() for p in parameters if p.grad is not None]
        squared = torch.nn.utils.get_total_norm(shards).to(self._device).float().square()
        dist.all_reduce(squared, group=self._shared_mesh()["dp"].get_group())
        return squared.sqrt()

    def backward(self, state: TrainState, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, summed over ranks. Collective over the world."""
        # FSDP2 averages over the mesh; the trainer's losses already carry the global denominator.
        (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, state: TrainState) -> StepReport:
        """Clip by the global norm, step and schedule; skipped when the norm is not finite. Collective."""
        state.memory.optimizer.reload()
        norm = self._global_norm(state.network.parameters())
        rate = float(state.optimizer.param_groups[0]["lr"])
        skipped = not bool(torch.isfinite(norm))
        if not skipped:
            if state.config.max_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(list(state.network.parameters()), state.config.max_norm, norm)
            state.optimizer.step()
            state.scheduler.step()
        state.optimizer.zero_grad(set_to_none=True)
        return StepReport(float(norm), rate, skipped)

    def save(self, state: TrainState, folder: Path, *, background: bool = False) -> Future[Any] | None:
        """Write a torch distributed checkpoint. Collective over the world.

        With `background` the state is copied to the host and the files are written meanwhile.

        Raises:
            CheckpointError: on all ranks, when one cannot write.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import save

        from rft_trainer.strategy.held_files import HeldFiles

        reload_state(state)
        begin_state(state.optimizer)
        model, optimizer = get_state_dict(state.network, state.optimizer, options=_trained_only())
        content = {"model": model, "optimizer": optimizer, "scheduler": state.scheduler.state_dict()}
        writer = FileSystemWriter(folder, sync_files=False)
        held = HeldFiles()
        if background:
            # All collectives are over when `save` returns; only bytes are left to be written.
            writer.fs = held
        try:
            save(content, storage_writer=writer)
        except CheckpointException as failure:
            raise CheckpointError(_first_failure(failure)) from failure
        return held.write() if background else None

    def load(self, state: TrainState, folder: Path) -> None:
        """Read a torch distributed checkpoint in place; any world size. Collective over the world."""
        reload_state(state)
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        from rft_trainer.strategy.safe_reading import SafePlanner, SafeReader

        begin_state(state.optimizer)
        model, optimizer = get_state_dict(state.network, state.optimizer, options=_trained_only())
        content: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": state.scheduler.state_dict(),
        }
        load(content, storage_reader=SafeReader(folder), planner=SafePlanner())
        set_state_dict(
            state.network,
            state.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
            options=_trained_only(),
        )
        state.scheduler.load_state_dict(content["scheduler"])

    def memory_of(self, model: TrainState | nn.Module) -> Movable:
        """Where a trained state's model, or a frozen model, is."""
        return self._roles.of(model)

    def offload_model(self, model: TrainState | nn.Module) -> None:
        """Parameters, gradients and buffers to the host. No communication."""
        self._roles.of(model).offload()

    def reload_model(self, model: TrainState | nn.Module) -> None:
        """Parameters, gradients and buffers back to the device. No communication."""
        self._roles.of(model).reload()

    def offload_optimizer(self, state: TrainState) -> None:
        """Optimiser state to the host. No communication."""
        state.memory.optimizer.offload()

    def load_optimizer(self, state: TrainState) -> None:
        """Optimiser state back to the device. No communication."""
        state.memory.optimizer.reload()


def _reshard(model: nn.Module) -> Callable[[], None]:
    return cast(FSDPModule, model).reshard


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks that a Hugging Face model names in `_no_split_modules`, outermost ones only."""
    names = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if type(module).__name__ in names and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def _first_failure(failure: Any) -> str:
    """What went wrong on the first rank that failed, in one line."""
    rank, (error, _) = next(iter(sorted(failure.failures.items())))
    return f"rank {rank}: {type(error).__name__}: {error}"


def _trained_only() -> Any:
    """Frozen weights are those of the initial checkpoint, which a resumed run reads anyway."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(ignore_frozen_params=True, strict=False)
