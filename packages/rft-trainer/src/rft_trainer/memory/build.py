"""The memory of a run's phases from its configuration."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from rft_trainer.config import RFTConfig
from rft_trainer.config.distribution import computes_in_bf16
from rft_trainer.memory.forecast import ENGINE_WEIGHTS, Cluster, Forecast, forecast
from rft_trainer.memory.ledger import MemoryLedger
from rft_trainer.memory.plan import PlacementPlan, plan_placement
from rft_trainer.memory.shapes import model_shapes
from rft_trainer.memory.stage import Stage, move_metrics
from rft_trainer.models.lora import WithoutAdapters
from rft_trainer.strategy import Strategy, TrainState
from rft_trainer.strategy.protocols import Movable
from rft_trainer.strategy.residency import OPTIMIZER_SUFFIX, storage_bytes


def placement_plan(config: RFTConfig, trained: tuple[str, ...], frozen: tuple[str, ...]) -> PlacementPlan:
    """The plan of a run with these models."""
    return plan_placement(
        trained=trained,
        frozen=frozen,
        offload_trained=config.offload_trained,
        offload_frozen=config.offload_frozen,
        # Under ZeRO the optimiser itself runs on the host, and its state never leaves it.
        optimizer_on_host=config.adam_offload and config.fsdp,
        engine_sleeps=config.enable_engine_sleep,
    )


class StagedMemory:
    """PhaseMemory of a run: owners are placed when a phase begins and measured when it ends."""

    def __init__(self, stage: Stage, ledger: MemoryLedger) -> None:
        self.stage = stage
        self.ledger = ledger

    def enter(self, phase: str) -> None:
        """Place every owner for `phase`. Collective over the world where the engine's weights are sent again."""
        if self.stage.enter(phase):
            self.ledger.slept()
        self.ledger.begin()

    def leave(self, phase: str) -> None:
        """Measure."""
        self.ledger.end(phase)

    def metrics(self, step: int) -> dict[str, float]:
        """Seconds and GB/s of this rank's moves since the last step, and the ledger's peaks."""
        self.ledger.step = step
        return {**move_metrics(self.stage.take_moves()), **self.ledger.metrics()}

    def table(self) -> str:
        """The ledger's table."""
        return self.ledger.table()


def phase_memory(
    config: RFTConfig, strategy: Strategy, *, trained: Mapping[str, TrainState], frozen: Mapping[str, nn.Module]
) -> StagedMemory:
    """The memory of a run whose trained models include `actor`; no communication.

    Args:
        config: the run's settings.
        strategy: with an engine.
        trained: name -> state, such as actor and critic.
        frozen: name -> model as `prepare_frozen` gave it; a reference that is the actor without adapters owns nothing.
    """
    owners: dict[str, Movable] = {}
    for name, state in trained.items():
        owners[name] = state.memory.model
        owners[name + OPTIMIZER_SUFFIX] = state.memory.optimizer
    own = {name: model for name, model in frozen.items() if not isinstance(model, WithoutAdapters)}
    owners.update({name: strategy.backend.memory_of(model) for name, model in own.items()})
    plan = placement_plan(config, tuple(trained), tuple(own))
    runtime, device = strategy.runtime, strategy.device
    stage = Stage(plan, owners, runtime, trained["actor"], device, full_updates=True)
    measures: dict[str, Callable[[], int]] = {
        owner: partial(_resident_bytes, memory, device) for owner, memory in owners.items()
    }
    if isinstance(runtime.engine.native, nn.Module):
        native = runtime.engine.native
        measures[ENGINE_WEIGHTS] = lambda: storage_bytes(native.parameters(), device)
    expected = forecast_of(config, strategy.data.size, device, frozen=len(own)).phases
    file = config.output_dir / f"memory.rank{strategy.data.rank}.jsonl"
    return StagedMemory(stage, MemoryLedger(measures, plan, expected, device, file=file))


def _resident_bytes(memory: Movable, device: torch.device) -> int:
    """On a CPU nothing is freed by a move, but the owner is away all the same."""
    return 0 if memory.on_host and device.type == "cpu" else memory.nbytes()


def forecast_of(config: RFTConfig, ranks: int, device: torch.device, *, frozen: int) -> Forecast:
    """What this run's ranks should hold. No communication."""
    assert config.pretrain is not None
    capacity = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    bf16 = computes_in_bf16(config, device.type)
    return forecast_from_config(config, Cluster(ranks=ranks, device_bytes=capacity, bf16=bf16), frozen=frozen)


def forecast_from_config(config: RFTConfig, cluster: Cluster, *, frozen: int) -> Forecast:
    """The forecast of `config` on `cluster`, from the checkpoint's config.json."""
    assert config.pretrain is not None
    base = model_shapes(config.pretrain)
    actor = base
    if config.freeze or config.lora_rank:
        actor = model_shapes(config.pretrain, freeze=config.freeze, adapters=config.adapters(config.seed))
    plan = placement_plan(config, ("actor",), ("reference",) if frozen else ())
    return forecast(config, cluster, plan, actor, base, frozen=frozen)
