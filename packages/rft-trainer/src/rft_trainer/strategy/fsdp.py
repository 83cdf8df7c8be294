"""FSDP2 training: `fully_shard` on the model's own blocks, AdamW on the local shards."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rft_trainer.config import OptimizerConfig
from rft_trainer.optim import build_adamw, build_schedule
from rft_trainer.strategy.protocols import StepReport, TrainState


class FSDPBackend:
    """TrainingBackend and Residency on torch FSDP2.

    bf16 computes in bfloat16 and keeps fp32 masters and fp32 gradient reduction.
    """

    name = "fsdp2"

    def __init__(self, device: torch.device, *, bf16: bool = False) -> None:
        self._device = device
        self._policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if bf16
            else MixedPrecisionPolicy()
        )
        self._mesh: DeviceMesh | None = None

    def prepare(self, model: nn.Module, config: OptimizerConfig) -> TrainState:
        """Shard and build the optimiser over the local shards. Collective over the world."""
        self._shard(model)
        optimizer = build_adamw(model, config.adamw)
        schedule = build_schedule(optimizer, config.schedule)
        return TrainState(model, model, optimizer, schedule, config, release_gathered=model.reshard)  # type: ignore[arg-type]

    def prepare_frozen(self, model: nn.Module) -> nn.Module:
        """Shard a model that is only scored. Collective over the world."""
        model.requires_grad_(False).eval()
        self._shard(model, reshard_root=True)
        return model

    def _shard(self, model: nn.Module, *, reshard_root: bool = False) -> None:
        if self._mesh is None:
            self._mesh = init_device_mesh(self._device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
        model.to(self._device)
        for block in transformer_blocks(model):
            fully_shard(block, mesh=self._mesh, mp_policy=self._policy)
        # A root that will run backward keeps its weights for it; one that is only scored gives them back.
        fully_shard(model, mesh=self._mesh, mp_policy=self._policy, reshard_after_forward=reshard_root)

    def backward(self, state: TrainState, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, summed over ranks. Collective over the world."""
        # FSDP2 averages over the mesh; the trainer's losses already carry the global denominator.
        (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, state: TrainState) -> StepReport:
        """Clip by the global norm, step and schedule; skipped when the norm is not finite. Collective."""
        grads = [p.grad for p in state.network.parameters() if p.grad is not None]
        norm = _whole(torch.nn.utils.get_total_norm(grads))
        rate = float(state.optimizer.param_groups[0]["lr"])
        skipped = not bool(torch.isfinite(norm))
        if not skipped:
            if state.config.max_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(list(state.network.parameters()), state.config.max_norm, norm)
            state.optimizer.step()
            state.scheduler.step()
        state.optimizer.zero_grad(set_to_none=True)
        return StepReport(float(norm), rate, skipped)

    def save(self, state: TrainState, folder: Path) -> None:
        """Write a torch distributed checkpoint. Collective over the world."""
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import save

        model, optimizer = get_state_dict(state.network, state.optimizer, options=_trained_only())
        save({"model": model, "optimizer": optimizer, "scheduler": state.scheduler.state_dict()}, checkpoint_id=folder)

    def load(self, state: TrainState, folder: Path) -> None:
        """Read a torch distributed checkpoint in place; any world size. Collective over the world."""
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        model, optimizer = get_state_dict(state.network, state.optimizer, options=_trained_only())
        content: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": state.scheduler.state_dict(),
        }
        load(content, checkpoint_id=folder)
        set_state_dict(
            state.network,
            state.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
            options=_trained_only(),
        )
        state.scheduler.load_state_dict(content["scheduler"])

    def offload_model(self, state: TrainState) -> None:
        """Parameters, gradients and buffers to the host."""
        state.network.to("cpu")

    def reload_model(self, state: TrainState) -> None:
        """Parameters, gradients and buffers back to the device."""
        state.network.to(self._device)

    def offload_optimizer(self, state: TrainState) -> None:
        """Optimiser state to the host."""
        _move_optimizer(state.optimizer, torch.device("cpu"))

    def load_optimizer(self, state: TrainState) -> None:
        """Optimiser state back to the device."""
        _move_optimizer(state.optimizer, self._device)


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


def _trained_only() -> Any:
    """Frozen weights are those of the initial checkpoint, which a resumed run reads anyway."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(ignore_frozen_params=True, strict=False)


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    states: Iterable[dict[str, Any]] = optimizer.state.values()
    for entry in states:
        for key, value in entry.items():
            # The step counter of AdamW lives on the host unless the optimiser is fused.
            if isinstance(value, Tensor) and key != "step":
                entry[key] = value.to(device)
