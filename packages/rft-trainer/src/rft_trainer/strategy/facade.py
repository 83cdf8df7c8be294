"""The documented Strategy surface: one object for apps that delegates to the backend, the groups and the engine."""

import gc
import hashlib
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rft_dist import DistributedConfig, DistributedSession, ParallelLayout, build_rollout_groups, distributed_session
from rft_engines import EngineConfig, Generation, GenerationRequest, SamplingParams, create_engine
from rft_sync import SyncReport, source_for
from rft_trainer.config import OptimizerConfig, RFTConfig
from rft_trainer.config.distribution import computes_in_bf16
from rft_trainer.data import DataSampler
from rft_trainer.export import export_adapter, export_model
from rft_trainer.strategy.data_parallel import WorldDataParallel
from rft_trainer.strategy.deepspeed import DeepspeedBackend
from rft_trainer.strategy.fsdp import FSDPBackend
from rft_trainer.strategy.protocols import StepReport, TrainState
from rft_trainer.strategy.rollout import EngineRuntime


class Strategy:
    """Distributed set-up, backend, engine life cycle and weight sync behind one set of names.

    Use as a context manager after `setup_distributed`; leaving it closes the engine and the process groups.
    """

    initialise: Callable[[str, timedelta], None] | None = None
    """Creates the default process group; None: torch does."""

    def __init__(self, config: RFTConfig) -> None:
        self.config = config
        self._stack = ExitStack()
        self._session: DistributedSession | None = None
        self._backend: FSDPBackend | DeepspeedBackend | None = None
        self._runtime: EngineRuntime | None = None

    def _make_backend(self, device: torch.device, bf16: bool) -> FSDPBackend | DeepspeedBackend:
        raise NotImplementedError("Strategy is abstract: use get_strategy(config)")

    # -- life of the process groups

    def setup_distributed(self) -> Self:
        """Bind the device, create the default group and the rollout groups. Collective over the world."""
        config = DistributedConfig(
            device=self.config.device,
            timeout_seconds=self.config.collective_timeout_seconds,
            guard=self.config.collective_guard,
        )
        self._session = self._stack.enter_context(distributed_session(config, initializer=self.initialise))
        self.layout = ParallelLayout(
            self._session.world_size,
            self.config.engine_tp_size,
            rank=self._session.rank,
            local_world_size=self._session.local_world_size,
        )
        self.groups = build_rollout_groups(self.layout)
        self._stack.callback(self.groups.close)
        self._backend = self._make_backend(self.device, self.bf16)
        # Host-side numbers, objects and barriers travel over gloo, whatever the device's backend is.
        gloo = dist.get_backend() == "gloo"
        self.host_group = dist.group.WORLD if gloo else dist.new_group(backend="gloo")
        self.data = WorldDataParallel(self.device, self.host_group)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Sharded modules hold process groups; one that outlives its group can end the process at exit.
        gc.collect()
        self._stack.__exit__(kind, error, trace)

    @property
    def session(self) -> DistributedSession:
        """Rank, sizes and device of this process."""
        if self._session is None:
            raise RuntimeError("no process group yet: call setup_distributed() first")
        return self._session

    @property
    def backend(self) -> FSDPBackend | DeepspeedBackend:
        """The TrainingBackend."""
        if self._backend is None:
            raise RuntimeError("no backend yet: call setup_distributed() first")
        return self._backend

    @property
    def runtime(self) -> EngineRuntime:
        """The RolloutRuntime."""
        if self._runtime is None:
            raise RuntimeError("no engine yet: call create_engine() first")
        return self._runtime

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.session.device

    @property
    def bf16(self) -> bool:
        """Compute in bfloat16."""
        return computes_in_bf16(self.config, self.device.type)

    # -- training

    def build_sampler(
        self, size: int, batch_size: int, *, shuffle: bool = True, drop_last: bool = False
    ) -> DataSampler:
        """Seeded sampler of this rank's share of each global batch, reshuffled by epoch; resumable."""
        return DataSampler(
            size,
            batch_size=batch_size,
            rank=self.data.rank,
            num_ranks=self.data.size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=self.config.seed,
        )

    def prepare(self, model: nn.Module, optimizer: OptimizerConfig | None = None, *, role: str = "actor") -> TrainState:
        """Wrap a model for training. Collective over the world."""
        return self.backend.prepare(model, optimizer or self.config.actor_optimizer(), role=role)

    def prepare_frozen(self, model: nn.Module, *, role: str = "reference") -> nn.Module:
        """Wrap a model that is only scored. Collective over the world."""
        return self.backend.prepare_frozen(model, role=role)

    def release(self, state: TrainState) -> None:
        """End the training of a model; the caller drops its own references then. No communication."""
        self.backend.release(state)

    def backward(self, state: TrainState, loss: Tensor, *, last: bool = True) -> None:
        """Add the gradient of `loss`. Collective over the world."""
        self.backend.backward(state, loss, last=last)

    def optimizer_step(self, state: TrainState) -> StepReport:
        """Clip, step and schedule. Collective over the world."""
        return self.backend.optimizer_step(state)

    # -- rollout

    def create_engine(self, engine: EngineConfig, **options: Any) -> EngineRuntime:
        """Start the rollout engine, vLLM and SGLang in the dtype that the actor computes in unless `engine` names one.

        Collective over the world.
        """
        seeded = replace(in_dtype_of_actor(engine, bf16=self.bf16), seed=self.layout.engine_seed(self.config.seed))
        made = create_engine(seeded, groups=self.groups, **options)
        self._runtime = EngineRuntime(
            made,
            self.groups,
            enable_sleep=self.config.enable_engine_sleep,
            max_lag=self.config.max_weight_lag,
            share_weights=self.config.share_engine_weights,
            adapter_only=self.config.sends_adapter_only,
        )
        self._stack.callback(self._runtime.close)
        return self._runtime

    def gather_and_generate(self, requests: list[GenerationRequest], sampling: SamplingParams) -> list[Generation]:
        """Generate for this rank's requests. Collective over the rollout TP group."""
        return self.runtime.generate(requests, sampling)

    def engine_sleep(self, level: Any = None) -> None:
        """Let the engine release memory."""
        self.runtime.engine.sleep(level)

    def engine_wake_up(self, tags: tuple[str, ...] | None = None) -> None:
        """Bring the engine's memory back."""
        self.runtime.engine.wake_up(tags)

    def update_engine_weights(self, actor: TrainState) -> SyncReport:
        """Send the actor's weights to the engine. Collective over the world."""
        return self.runtime.update_engine_weights(actor)

    # -- residency

    def offload_model(self, model: TrainState | nn.Module) -> None:
        """A trained state's model, or a frozen model, to the host."""
        self.backend.offload_model(model)

    def reload_model(self, model: TrainState | nn.Module) -> None:
        """A trained state's model, or a frozen model, back to the device."""
        self.backend.reload_model(model)

    def offload_optimizer(self, state: TrainState) -> None:
        """Optimiser state to the host."""
        self.backend.offload_optimizer(state)

    def load_optimizer(self, state: TrainState) -> None:
        """Optimiser state back to the device."""
        self.backend.load_optimizer(state)

    # -- persistence

    def save_checkpoint(self, state: TrainState, folder: Path) -> None:
        """Write the sharded training state. Collective over the world."""
        self.backend.save(state, folder)

    def load_checkpoint(self, state: TrainState, folder: Path) -> None:
        """Read the sharded training state. Collective over the world."""
        self.backend.load(state, folder)

    def save_model(self, state: TrainState, folder: Path, tokenizer: Any) -> None:
        """Write a Hugging Face folder in safetensors. Collective over the world."""
        self.backend.reload_model(state)
        export_model(state, folder, tokenizer, group=self.host_group)

    def parameter_count(self, state: TrainState) -> int:
        """Weights of the model, tied ones once. No communication."""
        metadata = source_for(state.checkpoint_module).metadata()
        return sum(math.prod(meta.shape) for meta in metadata if meta.alias_of is None)

    def model_form(self, state: TrainState) -> str:
        """Names and shapes of the model's weights, as one short text. No communication."""
        metadata = sorted(source_for(state.checkpoint_module).metadata(), key=lambda meta: meta.name)
        forms = "\n".join(f"{meta.name} {tuple(meta.shape)}" for meta in metadata)
        return f"{len(metadata)} tensors, {hashlib.sha256(forms.encode()).hexdigest()[:12]}"

    def save_adapter(self, state: TrainState, folder: Path) -> None:
        """Write the adapter of a LoRA actor in PEFT's format. Collective over the world."""
        self.backend.reload_model(state)
        export_adapter(state, folder, group=self.host_group)

    def on_main(self, action: Callable[[], None]) -> None:
        """Run on rank 0 while the others wait; its error is raised on every rank. Collective over the world."""
        self.data.on_main(action)


def in_dtype_of_actor(engine: EngineConfig, *, bf16: bool) -> EngineConfig:
    """An engine of its own, and without a dtype of its own, in the dtype that the actor computes in.

    Left alone vLLM runs a checkpoint of fp32 in half precision, beside an actor in fp32 too.
    """
    if engine.kind == "hf" or engine.dtype != "auto":
        return engine
    return replace(engine, dtype="bfloat16" if bf16 else "float32")


class FSDPV2Strategy(Strategy):
    """Strategy on torch FSDP2; its group comes from torch."""

    def _make_backend(self, device: torch.device, bf16: bool) -> FSDPBackend:
        config = self.config
        return FSDPBackend(
            device,
            bf16=bf16,
            shard_size=config.fsdp_shard_size,
            reshard=config.fsdp_reshard,
            cpu_offload=config.fsdp_cpu_offload,
        )


class DeepspeedStrategy(Strategy):
    """Strategy on DeepSpeed ZeRO; its group comes from deepspeed.init_distributed."""

    initialise = staticmethod(DeepspeedBackend.initialise)

    def _make_backend(self, device: torch.device, bf16: bool) -> DeepspeedBackend:
        config = self.config
        return DeepspeedBackend(
            device,
            stage=config.zero_stage,
            bf16=bf16,
            adam_offload=config.adam_offload,
            hpz_size=config.zero_hpz_size,
            overlap=config.zero_overlap,
        )


def get_strategy(args: RFTConfig) -> Strategy:
    """FSDPV2Strategy when `args.fsdp`, else DeepspeedStrategy."""
    return FSDPV2Strategy(args) if args.fsdp else DeepspeedStrategy(args)
