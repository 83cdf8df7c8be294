"""The memory of a run's phases from its configuration."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rft_engines import contract
from rft_trainer.algorithms import AdvantageEstimator
from rft_trainer.config import RFTConfig
from rft_trainer.errors import ConfigurationError
from rft_trainer.memory.forecast import (
    ACTOR,
    ENGINE_WEIGHTS,
    GIB,
    GRAPHS,
    KV_CACHE,
    WARM_START,
    Cluster,
    Forecast,
    Models,
    forecast,
    warm_start_row,
)
from rft_trainer.memory.ledger import MemoryLedger
from rft_trainer.memory.plan import PlacementPlan, plan_placement
from rft_trainer.memory.shapes import ModelShapes, model_shapes, read_config
from rft_trainer.memory.stage import Stage, move_metrics
from rft_trainer.models.lora import WithoutAdapters
from rft_trainer.strategy import Strategy, TrainState
from rft_trainer.strategy.protocols import Movable
from rft_trainer.strategy.residency import OPTIMIZER_SUFFIX, storage_bytes

logger = logging.getLogger("rft_trainer.memory")
_ENGINE_OWNERS = {contract.WEIGHTS: ENGINE_WEIGHTS, contract.KV_CACHE: KV_CACHE, contract.CUDA_GRAPHS: GRAPHS}


def placement_plan(config: RFTConfig, trained: tuple[str, ...], frozen: tuple[str, ...]) -> PlacementPlan:
    """The plan of a run with these models."""
    return plan_placement(
        trained=trained,
        frozen=frozen,
        # What CPUOffloadPolicy places is never moved by hand.
        offload_trained=config.offload_trained and not config.fsdp_cpu_offload,
        offload_frozen=config.offload_frozen,
        # Under ZeRO the optimiser itself runs on the host, and its state never leaves it.
        optimizer_on_host=config.adam_offload and config.fsdp,
        engine_sleeps=config.enable_engine_sleep,
        more_rounds=config.dynamic_sampling and config.dynamic_sampling_rounds > 1,
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

    def begin(self, step: int) -> None:
        """Later entries of the ledger are of `step`."""
        self.ledger.step = step

    def metrics(self, step: int) -> dict[str, float]:
        """Seconds and GB/s of this rank's moves since the last step, and the ledger's peaks."""
        return {**move_metrics(self.stage.take_moves()), **self.ledger.metrics()}

    def table(self) -> str:
        """The ledger's table."""
        return self.ledger.table()


def phase_memory(
    config: RFTConfig,
    strategy: Strategy,
    *,
    trained: Mapping[str, TrainState],
    frozen: Mapping[str, nn.Module],
    beside: Mapping[str, Callable[[], Iterable[Tensor]]] | None = None,
) -> StagedMemory:
    """The memory of a run whose trained models include `actor`; no communication.

    Args:
        config: the run's settings.
        strategy: with an engine.
        trained: name -> state, such as actor and critic.
        frozen: name -> model as `prepare_frozen` gave it; a reference that is the actor without adapters owns nothing.
        beside: name -> tensors of what is never moved, such as experiences and a weight average.
    """
    owners: dict[str, Movable] = {}
    for name, state in trained.items():
        owners[name] = state.memory.model
        owners[name + OPTIMIZER_SUFFIX] = state.memory.optimizer
    own = {name: model for name, model in frozen.items() if not isinstance(model, WithoutAdapters)}
    owners.update({name: strategy.backend.memory_of(model) for name, model in own.items()})
    plan = placement_plan(config, tuple(trained), tuple(own))
    runtime, device = strategy.runtime, strategy.device
    stage = Stage(plan, owners, runtime, trained["actor"], device, full_updates=not config.sends_adapter_only)
    measures: dict[str, Callable[[], int]] = {
        owner: partial(_resident_bytes, memory, device) for owner, memory in owners.items()
    }
    for owner, tensors in (beside or {}).items():
        measures[owner] = partial(_bytes_of, tensors, device)
    engine_memory: Callable[[], Mapping[str, int]] = getattr(runtime.engine, "memory", dict)
    expected = _expected(config, strategy, plan, trained, own)
    file = config.output_dir / f"memory.rank{strategy.data.rank}.jsonl"
    ledger = MemoryLedger(measures, plan, expected, device, file=file, engine=partial(_engine_rows, engine_memory))
    return StagedMemory(stage, ledger)


def _engine_rows(memory: Callable[[], Mapping[str, int]]) -> dict[str, int]:
    """The engine's kinds of memory under the names of the forecast."""
    return {_ENGINE_OWNERS[kind]: size for kind, size in memory().items()}


def _bytes_of(tensors: Callable[[], Iterable[Tensor]], device: torch.device) -> int:
    return storage_bytes(tensors(), device)


def _resident_bytes(memory: Movable, device: torch.device) -> int:
    """On a CPU nothing is freed by a move, but the owner is away all the same."""
    return 0 if memory.on_host and device.type == "cpu" else memory.nbytes()


def _expected(
    config: RFTConfig,
    strategy: Strategy,
    plan: PlacementPlan,
    trained: Mapping[str, TrainState],
    frozen: Mapping[str, nn.Module],
) -> Mapping[str, Mapping[str, int]]:
    """The forecast of the models that are there; empty for an architecture that transformers cannot build by itself."""
    try:
        models = models_of(
            config,
            _hf_config(trained["actor"].network),
            critic=_hf_config(trained["critic"].network) if "critic" in trained else None,
            frozen={role: _hf_config(model) for role, model in frozen.items()},
        )
    except ConfigurationError as unknown:
        logger.warning("no forecast beside the measured bytes: %s", unknown)
        return {}
    return forecast(config, cluster_of(strategy), plan, models).phases


def cluster_of(strategy: Strategy) -> Cluster:
    """What a forecast needs to know of the ranks that a strategy runs on; device bytes are those of this rank."""
    device = strategy.device
    capacity = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return Cluster(ranks=strategy.data.size, device_bytes=capacity, bf16=strategy.bf16)


def announce_forecast(
    config: RFTConfig, strategy: Strategy, folder: str, *, warm_starts: bool, say: Callable[[str], None]
) -> Forecast | None:
    """Say what the run's phases will hold, before any model is loaded; no communication.

    Args:
        config: the run's settings.
        strategy: set up, without an engine.
        folder: the checkpoint that the run begins with.
        warm_starts: supervised steps come first; a resumed run has them behind it.
        say: told in one line.

    Returns:
        The forecast; None for an architecture that transformers cannot build by itself.
    """
    others = {name: name for name in (config.critic_pretrain, config.teacher) if name is not None}
    try:
        files = {name: read_config(found) for name, found in (others | {config.pretrain: folder}).items()}
        made = configured_forecast(config, cluster_of(strategy), files, warm_starts=warm_starts)
    except ConfigurationError as unknown:
        logger.warning("no forecast: %s", unknown)
        return None
    say_forecast(made, cluster_of(strategy).device_bytes, say)
    return made


def say_forecast(made: Forecast, device_bytes: int | None, say: Callable[[str], None]) -> None:
    """One line about the largest phase, and about a warm start; a warning when one is larger than the device."""
    text = f"forecast for a rank: {made.peak / GIB:.2f} GiB in {made.peak_phase}, the largest phase"
    if WARM_START in made.phases and made.peak_phase != WARM_START:
        text += f", and {made.total(WARM_START) / GIB:.2f} GiB in {WARM_START}"
    if device_bytes is None:
        say(text)
    elif made.peak <= device_bytes:
        say(f"{text}, of {device_bytes / GIB:.2f} GiB")
    else:
        logger.warning(
            "%s, and the device has %.2f GiB: it will probably not fit; --dry_run says which flag would help",
            text,
            device_bytes / GIB,
        )


def configured_forecast(
    config: RFTConfig,
    cluster: Cluster,
    files: Mapping[str | None, Any],
    *,
    warm_starts: bool,
    shapes: Callable[..., ModelShapes] = model_shapes,
) -> Forecast:
    """The forecast of a run from settings and Hugging Face configurations alone.

    Args:
        config: the run's settings.
        cluster: where it will be.
        files: `pretrain`, `critic_pretrain` and `teacher` as the settings have them -> configuration.
        warm_starts: supervised steps come first.
        shapes: makes the shapes of one model.

    Raises:
        ConfigurationError: one of them describes no causal model.
    """
    frozen: dict[str, Any] = {}
    if config.init_kl_coef > 0 and (config.lora_rank == 0 or config.separate_reference):
        frozen["reference"] = files[config.pretrain]
    if config.teacher is not None:
        frozen["teacher"] = files[config.teacher]
    critic = None
    if AdvantageEstimator.get(config.advantage_estimator).needs_critic:
        critic = files[config.critic_pretrain or config.pretrain]
    models = models_of(config, files[config.pretrain], critic=critic, frozen=frozen, shapes=shapes)
    if warm_starts:
        models = replace(models, warm_start=warm_start_shapes(config, files[config.pretrain], shapes))
    plan = placement_plan(config, tuple(models.trained), tuple(models.frozen))
    return forecast(config, cluster, plan, models)


def warm_start_shapes(config: RFTConfig, actor: Any, shapes: Callable[..., ModelShapes] = model_shapes) -> ModelShapes:
    """Shapes of the policy of supervised steps, which has no adapters; `actor` is its Hugging Face configuration."""
    return shapes(actor, freeze=config.freeze) if config.freeze else shapes(actor)


def warm_start_ledger(config: RFTConfig, strategy: Strategy, actor: TrainState) -> MemoryLedger:
    """The ledger of supervised steps on `actor`, which are the first of a run to write one; no communication."""
    file = config.output_dir / f"memory.rank{strategy.data.rank}.jsonl"
    # A warm start that was not finished begins anew, and so does its record.
    file.unlink(missing_ok=True)
    expected: dict[str, Mapping[str, int]] = {}
    try:
        found = warm_start_shapes(config, _hf_config(actor.network))
        expected[WARM_START] = warm_start_row(found, config, cluster_of(strategy))
    except ConfigurationError as unknown:
        logger.warning("no forecast beside the measured bytes: %s", unknown)
    owners: dict[str, Movable] = {ACTOR: actor.memory.model, ACTOR + OPTIMIZER_SUFFIX: actor.memory.optimizer}
    measures: dict[str, Callable[[], int]] = {
        owner: partial(_resident_bytes, memory, strategy.device) for owner, memory in owners.items()
    }
    return MemoryLedger(measures, PlacementPlan({}), expected, strategy.device, file=file)


def models_of(
    config: RFTConfig,
    actor: Any,
    *,
    critic: Any | None,
    frozen: Mapping[str, Any],
    shapes: Callable[..., ModelShapes] = model_shapes,
) -> Models:
    """Shapes of a run's models from their Hugging Face configurations; `shapes` makes those of one.

    Raises:
        ConfigurationError: one of them describes no causal model.
    """
    base = shapes(actor)
    policy = base
    if config.freeze or config.lora_rank:
        policy = shapes(actor, freeze=config.freeze, adapters=config.adapters(config.seed))
    trained = {"actor": policy}
    if critic is not None:
        trained["critic"] = shapes(critic, critic=True)
    return Models(trained=trained, frozen={role: shapes(found) for role, found in frozen.items()}, base=base)


def _hf_config(model: nn.Module) -> Any:
    for module in model.modules():
        found = getattr(module, "config", None)
        if hasattr(found, "get_text_config"):
            return found
    raise ConfigurationError(f"{type(model).__name__} has no Hugging Face configuration")
