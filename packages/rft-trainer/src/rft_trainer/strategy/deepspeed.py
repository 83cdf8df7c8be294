"""DeepSpeed training: ZeRO stage 0 to 3, gradients owned by the caller."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rft_trainer.config import OptimizerConfig
from rft_trainer.errors import CheckpointError
from rft_trainer.optim import build_adamw, build_schedule
from rft_trainer.strategy.checkpoint_engine import ShardFiles
from rft_trainer.strategy.protocols import Movable, Move, StateMemory, StepReport, TrainState
from rft_trainer.strategy.residency import (
    OPTIMIZER_SUFFIX,
    MovableMemory,
    RoleMemory,
    guard,
    module_tensors,
    optimizer_tensors,
    reload_state,
)

# The trainer marks the last micro-batch itself. Any value above 1 makes DeepSpeed keep the buffers that
# accumulation needs (with optimiser offload it would otherwise keep only the last gradient); it scales nothing,
# because backward is called with scale_wrt_gas=False.
_CALLER_ACCUMULATES = 2
_TAG = "state"


def sums_in_fp32(*, stage: int, adam_offload: bool) -> bool:
    """Whether gradients of a bfloat16 run are added up in fp32 over micro-batches.

    Not at stage 0: DeepSpeed refuses it ("unsupported mix", `DeepSpeedEngine._do_optimizer_sanity_check`). Nor at stage
    1 with its optimiser on the device: the same place takes that to `BF16_Optimizer`, which holds whole fp32 gradients
    from its start to its end, also while the engine generates, and can offload nothing.
    """
    return stage >= 2 or (stage == 1 and adam_offload)


class DeepspeedBackend:
    """TrainingBackend and Residency on DeepSpeed.

    Args:
        device: of this rank.
        stage: of ZeRO; 0 is plain data parallelism.
        bf16: compute in bfloat16; DeepSpeed keeps fp32 masters. Gradients are reduced over the ranks in fp32, and added
            up over micro-batches in fp32 where `sums_in_fp32`; stage 2 divides by the ranks in bfloat16 before that.
        adam_offload: the optimiser lives and steps on the host (stages 1 to 3).
        hpz_size: ranks of stage 3's secondary partition (ZeRO++ hpZ); 1: none.
        overlap: reduce gradients during backward; None: on a GPU.
    """

    resizable = False

    def __init__(
        self,
        device: torch.device,
        *,
        stage: int,
        bf16: bool = False,
        adam_offload: bool = False,
        hpz_size: int = 1,
        overlap: bool | None = None,
    ) -> None:
        self._device = device
        self.name = f"deepspeed zero {stage}"
        self._stage = stage
        self._bf16 = bf16
        self._adam_offload = adam_offload
        self._hpz_size = hpz_size
        self._overlap = device.type == "cuda" if overlap is None else overlap
        self._roles = RoleMemory()

    @staticmethod
    def initialise(backend: str, timeout: timedelta) -> None:
        """Create the default process group through DeepSpeed. Collective over the world."""
        import deepspeed

        quieten()
        deepspeed.init_distributed(
            dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=timeout, dist_init_required=True
        )

    def prepare(self, model: nn.Module, config: OptimizerConfig, *, role: str = "actor") -> TrainState:
        """Hand model and optimiser to DeepSpeed. Collective over the world."""
        import deepspeed

        model.to(self._device)
        optimizer = build_adamw(model, config.adamw)
        scheduler = build_schedule(optimizer, config.schedule)
        engine, wrapped, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self._settings(config.max_norm), dist_init_required=False
        )
        rest = MovableMemory(role, lambda: _shards_and_buffers(engine.module), self._device)
        memory = StateMemory(
            _EngineMemory(engine, rest) if self._stage and self._device.type != "cpu" else rest,
            # Not by DeepSpeed's call: stage 3 has it for FusedAdam only, and it brings nothing back alone.
            MovableMemory(role + OPTIMIZER_SUFFIX, lambda: _optimizer_memory(wrapped, self._stage), self._device),
        )
        guard(engine, memory.model)
        return TrainState(engine, engine.module, wrapped, scheduler, config, memory, release_gathered=lambda: None)

    def prepare_frozen(self, model: nn.Module, *, role: str = "reference") -> nn.Module:
        """A model that is only scored: sharded at stage 3, whole on each rank below. Collective over the world."""
        model.requires_grad_(False).eval()
        model.to(self._device)
        if self._bf16:
            # Not the buffers: rotary frequencies in bfloat16 turn a token at position 1000 by whole radians.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        wrapped: nn.Module = model
        if self._stage == 3:
            import deepspeed

            wrapped, *_ = deepspeed.initialize(model=model, config=self._settings(0.0), dist_init_required=False)
            wrapped.eval()
        # Without an optimiser DeepSpeed moves nothing; the shards of stage 3 are tensors like any other.
        memory = MovableMemory(role, lambda: _shards_and_buffers(model), self._device)
        self._roles.add_frozen(wrapped, memory)
        return wrapped

    def release(self, state: TrainState) -> None:
        """End the training of `state`: DeepSpeed lets go of its hooks and buffers. No communication."""
        engine: Any = state.module
        engine.destroy()

    def _settings(self, max_norm: float) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self._stage, "overlap_comm": self._overlap}
        if self._hpz_size > 1:
            zero["zero_hpz_partition_size"] = self._hpz_size
        if self._adam_offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self._device.type == "cuda"}
        settings: dict[str, Any] = {
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
        if self._bf16:
            settings["communication_data_type"] = "fp32"
            if sums_in_fp32(stage=self._stage, adam_offload=self._adam_offload):
                settings["data_types"] = {"grad_accum_dtype": "fp32"}
        return settings

    def backward(self, state: TrainState, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, summed over ranks. Collective over the world."""
        engine: Any = state.module
        engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the ranks; the trainer's losses already carry the global denominator.
        engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)

    def optimizer_step(self, state: TrainState) -> StepReport:
        """Clip, step, schedule; skipped on all ranks if one has a gradient that is not finite. Collective."""
        state.memory.optimizer.reload()
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
        flag = torch.ones((), dtype=torch.int32, device=self._device)
        # Read once, behind the reduction: a model has hundreds of gradients, and each reading would wait for the GPU.
        verdicts = [torch.isfinite(grad).all() for grad in self._local_gradients(state)]
        if verdicts:
            flag = flag * torch.stack(verdicts).all().to(self._device)
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
        if self._stage == 3:
            optimizer.averaged_gradients = {}
        else:
            # With the optimiser on the host too: what is added up in fp32 lies here until it is copied there.
            for key in optimizer.averaged_gradients:
                optimizer.averaged_gradients[key] = None
                optimizer.all_grad_tensors[key] = None

    def save(self, state: TrainState, folder: Path, *, background: bool = False) -> Future[Any] | None:
        """Write DeepSpeed's own checkpoint. Collective over the world.

        With `background` the state is copied to the host and the files are written meanwhile.

        Raises:
            OSError, RuntimeError: on the rank that cannot write.
        """
        reload_state(state)
        engine: Any = state.module
        files = self._shard_files(engine)
        files.copies = background
        engine.save_checkpoint(
            str(folder),
            tag=_TAG,
            client_state={"scheduler": state.scheduler.state_dict()},
            # Frozen weights are those of the initial checkpoint, which a resumed run reads anyway.
            exclude_frozen_parameters=True,
        )
        written = files.written()
        if background:
            return written
        written.result()
        return None

    def load(self, state: TrainState, folder: Path) -> None:
        """Read DeepSpeed's own checkpoint; the world size must be the one that wrote it. Collective over the world."""
        reload_state(state)
        engine: Any = state.module
        self._shard_files(engine)
        path, client = engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=False)
        if path is None:
            raise CheckpointError(f"{folder}: DeepSpeed found no checkpoint with tag {_TAG!r} there")
        state.scheduler.load_state_dict(client["scheduler"])

    def _shard_files(self, engine: Any) -> ShardFiles:
        """This package's reader and writer in the place of DeepSpeed's, which unpickles whatever a file asks for."""
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        if not isinstance(engine.checkpoint_engine, ShardFiles):
            engine.checkpoint_engine = ShardFiles([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address])
        return engine.checkpoint_engine

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
        """Optimiser state and fp32 masters to the host. No communication."""
        state.memory.optimizer.offload()

    def load_optimizer(self, state: TrainState) -> None:
        """Optimiser state and fp32 masters back to the device. No communication."""
        state.memory.optimizer.reload()


class _EngineMemory:
    """Movable over a DeepSpeed engine: trained weights and gradients by DeepSpeed's own calls, then what they leave."""

    def __init__(self, engine: Any, rest: MovableMemory) -> None:
        self.owner = rest.owner
        self._engine = engine
        self._rest = rest
        self._moves: list[Move] = []

    @property
    def on_host(self) -> bool:
        return self._rest.on_host

    def offload(self) -> None:
        if self.on_host:
            return
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

        names = ("lp_params", "lp_grads", "contiguous_grad_buffer")
        include = [OffloadStateTypeEnum(name) for name in names]
        self._timed("offload", lambda: self._engine.offload_states(include=include))
        self._rest.offload()

    def reload(self) -> None:
        if not self.on_host:
            return
        self._timed("reload", self._engine.reload_states)
        self._rest.reload()

    def require(self, call: str) -> None:
        self._rest.require(call)

    def take_moves(self) -> list[Move]:
        taken, self._moves = self._moves + self._rest.take_moves(), []
        return taken

    def nbytes(self) -> int:
        return self._rest.nbytes()

    def _timed(self, direction: str, move: Callable[[], None]) -> None:
        """DeepSpeed waits for its copies itself."""
        before, start = self.nbytes(), time.perf_counter()
        move()
        seconds = time.perf_counter() - start
        self._moves.append(Move(self.owner, direction, abs(before - self.nbytes()), seconds))


def _optimizer_memory(optimizer: Any, stage: int) -> Iterator[Tensor]:
    """State of the wrapped optimiser, and the fp32 masters that DeepSpeed steps."""
    yield from optimizer_tensors(getattr(optimizer, "optimizer", optimizer))
    masters = {
        0: "fp32_groups_flat_partition",
        1: "single_partition_of_fp32_groups",
        2: "single_partition_of_fp32_groups",
        3: "fp32_partitioned_groups_flat",
    }
    yield from getattr(optimizer, masters[stage], ())


def _shards_and_buffers(model: nn.Module) -> Iterator[Tensor]:
    yield from module_tensors(model)
    yield from (parameter.ds_tensor for parameter in model.parameters() if hasattr(parameter, "ds_tensor"))


def quieten() -> None:
    """Keep DeepSpeed's start-up chatter below warnings."""
    import logging

    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
