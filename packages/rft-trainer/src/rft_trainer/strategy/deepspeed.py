"""DeepSpeed training: ZeRO stage 0 to 3, gradients owned by the caller."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rft_trainer.config import OptimizerConfig
from rft_trainer.errors import CheckpointError
from rft_trainer.optim import build_adamw, build_schedule
from rft_trainer.strategy.protocols import StepReport, TrainState

# The trainer marks the last micro-batch itself. Any value above 1 makes DeepSpeed keep the buffers that
# accumulation needs (with optimiser offload it would otherwise keep only the last gradient); it scales nothing,
# because backward is called with scale_wrt_gas=False.
_CALLER_ACCUMULATES = 2
_TAG = "state"


class DeepspeedBackend:
    """TrainingBackend on DeepSpeed.

    Stage 0 is plain data parallelism. With `bf16` DeepSpeed keeps fp32 masters. With `adam_offload` the optimiser
    lives on the host (stages 1 to 3).
    """

    def __init__(self, device: torch.device, *, stage: int, bf16: bool = False, adam_offload: bool = False) -> None:
        self._device = device
        self.name = f"deepspeed zero {stage}"
        self._stage = stage
        self._bf16 = bf16
        self._adam_offload = adam_offload

    @staticmethod
    def initialise(backend: str, timeout: timedelta) -> None:
        """Create the default process group through DeepSpeed. Collective over the world."""
        import deepspeed

        quieten()
        deepspeed.init_distributed(
            dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout, dist_init_required=True
        )

    def prepare(self, model: nn.Module, config: OptimizerConfig) -> TrainState:
        """Hand model and optimiser to DeepSpeed. Collective over the world."""
        import deepspeed

        model.to(self._device)
        optimizer = build_adamw(model, config.adamw)
        scheduler = build_schedule(optimizer, config.schedule)
        engine, wrapped, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self._settings(config.max_norm), dist_init_required=False
        )
        return TrainState(engine, engine.module, wrapped, scheduler, config, release_gathered=lambda: None)

    def prepare_frozen(self, model: nn.Module) -> nn.Module:
        """A model that is only scored: sharded at stage 3, whole on each rank below. Collective over the world."""
        model.requires_grad_(False).eval()
        model.to(self._device, torch.bfloat16 if self._bf16 else None)
        if self._stage < 3:
            return model
        import deepspeed

        engine, *_ = deepspeed.initialize(model=model, config=self._settings(0.0), dist_init_required=False)
        engine.eval()
        return engine  # type: ignore[no-any-return]

    def _settings(self, max_norm: float) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self._stage, "overlap_comm": self._device.type == "cuda"}
        if self._adam_offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self._device.type == "cuda"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": _CALLER_ACCUMULATES,
            "zero_optimization": zero,
            # Stage 0 is clipped by `optimizer_step`, which also reports its norm.
            "gradient_clipping": max_norm if self._stage else 0.0,
            "bf16": {"enabled": self._bf16},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }

    def backward(self, state: TrainState, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, summed over ranks. Collective over the world."""
        engine: Any = state.module
        engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the ranks; the trainer's losses already carry the global denominator.
        engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)

    def optimizer_step(self, state: TrainState) -> StepReport:
        """Clip, step, schedule; skipped on all ranks if one has a gradient that is not finite. Collective."""
        engine: Any = state.module
        rate = float(state.optimizer.param_groups[0]["lr"])
        if not self._all_finite(state):
            self._discard_gradients(state)
            return StepReport(float("nan"), rate, skipped=True)
        norm = self._clip_unsharded(state) if self._stage == 0 else None
        engine.step()
        state.scheduler.step()
        if norm is None:
            norm = float(engine.get_global_grad_norm())
        return StepReport(norm, rate, skipped=False)

    def _clip_unsharded(self, state: TrainState) -> float:
        parameters = [p for p in state.network.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if state.config.max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, state.config.max_norm, norm)
        return float(norm)

    def _all_finite(self, state: TrainState) -> bool:
        finite = all(bool(torch.isfinite(grad).all()) for grad in self._local_gradients(state))
        flag = torch.tensor(int(finite), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def _local_gradients(self, state: TrainState) -> Iterator[Tensor]:
        """This rank's reduced gradients, wherever the stage keeps them."""
        optimizer: Any = state.optimizer
        if self._stage == 0:
            yield from (p.grad for p in state.network.parameters() if p.grad is not None)
        elif self._adam_offload:
            masters = (
                optimizer.fp32_partitioned_groups_flat
                if self._stage == 3
                else optimizer.single_partition_of_fp32_groups
            )
            yield from (master.grad for master in masters if master.grad is not None)
        else:
            for grads in optimizer.averaged_gradients.values():
                yield from (grad for grad in grads or () if grad is not None)

    def _discard_gradients(self, state: TrainState) -> None:
        """Forget this step's gradients as DeepSpeed does after an overflow."""
        engine: Any = state.module
        optimizer: Any = state.optimizer
        engine.zero_grad()
        if self._stage == 0:
            return
        optimizer.zero_grad(set_to_none=True)
        if self._adam_offload:
            optimizer.reset_cpu_buffers()
        elif self._stage == 3:
            optimizer.averaged_gradients = {}
        else:
            for key in optimizer.averaged_gradients:
                optimizer.averaged_gradients[key] = None
                optimizer.all_grad_tensors[key] = None

    def save(self, state: TrainState, folder: Path) -> None:
        """Write DeepSpeed's own checkpoint. Collective over the world."""
        engine: Any = state.module
        engine.save_checkpoint(
            str(folder),
            tag=_TAG,
            client_state={"scheduler": state.scheduler.state_dict()},
            # Frozen weights are those of the initial checkpoint, which a resumed run reads anyway.
            exclude_frozen_parameters=True,
        )

    def load(self, state: TrainState, folder: Path) -> None:
        """Read DeepSpeed's own checkpoint; the world size must be the one that wrote it. Collective over the world."""
        engine: Any = state.module
        path, client = engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=False)
        if path is None:
            raise CheckpointError(f"{folder}: DeepSpeed found no checkpoint with tag {_TAG!r} there")
        state.scheduler.load_state_dict(client["scheduler"])

    def offload_model(self, state: TrainState) -> None:
        """Model parameters to the host, by DeepSpeed's own call; refused where DeepSpeed refuses."""
        self._move(state, "offload_states", ("lp_params", "hp_params"))

    def reload_model(self, state: TrainState) -> None:
        """Model parameters back to the device."""
        self._move(state, "reload_states", None)

    def offload_optimizer(self, state: TrainState) -> None:
        """Optimiser state to the host, by DeepSpeed's own call."""
        self._move(state, "offload_states", ("optim_states",))

    def load_optimizer(self, state: TrainState) -> None:
        """Optimiser state back to the device."""
        self._move(state, "reload_states", None)

    def _move(self, state: TrainState, call: str, names: tuple[str, ...] | None) -> None:
        if self._device.type == "cpu":
            return
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

        engine: Any = state.module
        if names is None:
            getattr(engine, call)()
        else:
            getattr(engine, call)(include=[OffloadStateTypeEnum(name) for name in names])


def quieten() -> None:
    """Keep DeepSpeed's start-up chatter below warnings."""
    import logging

    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
