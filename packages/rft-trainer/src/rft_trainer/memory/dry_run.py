"""A run on paper: groups, micro-batches, bytes by phase, whether they fit, and what each knob would change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rft_dist import ParallelLayout
from rft_trainer.config import RFTConfig
from rft_trainer.config.distribution import computes_in_bf16
from rft_trainer.errors import ConfigurationError, UnsupportedCombination
from rft_trainer.memory.backward import update_tokens, warm_start_tokens
from rft_trainer.memory.build import configured_forecast
from rft_trainer.memory.forecast import GIB, WARM_START, Cluster, Forecast, evaluates
from rft_trainer.memory.shapes import ModelShapes, model_shapes, read_config

_DEFAULT_DEVICE_GIB = 80
_RESERVED_BYTES = 2 * GIB
"""Left for the context, communication buffers and the allocator's rounding."""


@dataclass(frozen=True)
class Plan:
    """What a dry run found out.

    knobs: flag -> forecast with it, for flags that lower the peak.
    together: flags, each the best behind those before it, and the forecast with all of them; none where the run fits as
        it is, or with one flag.
    """

    config: RFTConfig
    cluster: Cluster
    forecast: Forecast
    knobs: Mapping[str, Forecast]
    together: tuple[tuple[str, ...], Forecast] | None = None

    @property
    def room(self) -> int:
        """Bytes that a rank may fill."""
        assert self.cluster.device_bytes is not None
        return self.cluster.device_bytes - _RESERVED_BYTES

    @property
    def fits(self) -> bool:
        """Whether every phase stays within the device, and the engine can begin."""
        return self.leaves_room(self.forecast) and not self.cache_problem

    def leaves_room(self, made: Forecast) -> bool:
        """Whether every phase of a forecast stays within the device."""
        return made.peak <= self.room

    @property
    def cache_problem(self) -> str:
        """Why the engine could not begin; empty where it can."""
        return _cache_problem(self.config, self.forecast)


def make_plan(config: RFTConfig, *, ranks: int, check: Callable[[RFTConfig], None] = lambda config: None) -> Plan:
    """Forecast of `config` and of each knob that lowers its peak. Reads config.json files, touches no device.

    Args:
        config: the run's settings.
        ranks: of the run.
        check: raises ConfigurationError for settings that cannot run; a knob that leads to such is left out.

    Raises:
        ConfigurationError: no model can be made from them.
    """
    assert config.pretrain is not None
    on_gpu = config.device != "cpu"
    cluster = Cluster(
        ranks=ranks, device_bytes=_device_bytes(config), bf16=computes_in_bf16(config, "cuda" if on_gpu else "cpu")
    )
    planner = _Planner(config, cluster, check)
    made = planner.foresee(config)
    first = planner.turned(config, made.peak)
    plan = Plan(config, cluster, made, {name: changed for name, (_, changed) in first.items()})
    if any(plan.leaves_room(found) for found in (made, *plan.knobs.values())):
        return plan
    return replace(plan, together=planner.together(plan, first))


_Turned = Mapping[str, tuple[RFTConfig, Forecast]]
"""Flag -> settings with it and their forecast."""


class _Planner:
    """Forecasts of a run's settings and of changed ones; the shapes of each model are made once."""

    def __init__(self, config: RFTConfig, cluster: Cluster, check: Callable[[RFTConfig], None]) -> None:
        folders = [config.pretrain, config.critic_pretrain, config.teacher]
        self._files: dict[str | None, Any] = {folder: read_config(folder) for folder in folders if folder is not None}
        self._cluster = cluster
        self._check = check
        self._made: dict[Any, ModelShapes] = {}

    def _shapes(self, found: Any, **options: Any) -> ModelShapes:
        key = (id(found), *sorted(options.items()))
        if key not in self._made:
            self._made[key] = model_shapes(found, **options)
        return self._made[key]

    def foresee(self, config: RFTConfig) -> Forecast:
        return configured_forecast(
            config, self._cluster, self._files, warm_starts=config.warm_starts, shapes=self._shapes
        )

    def turned(self, config: RFTConfig, peak: int) -> _Turned:
        """What each flag that is not turned yet would do, for the flags that lower the peak."""
        found: dict[str, tuple[RFTConfig, Forecast]] = {}
        starts = not _cache_problem(config, self.foresee(config))
        for name, changes in _changes(config).items():
            try:
                other = replace(config, **changes)
                self._check(other)
                changed = self.foresee(other)
            except (ConfigurationError, UnsupportedCombination):
                continue  # it does not go with the run's other settings, or not without an extra: no advice
            # An engine that would start must go on to.
            if changed.peak < peak and not (starts and _cache_problem(other, changed)):
                found[name] = other, changed
        return found

    def together(self, plan: Plan, found: _Turned) -> tuple[tuple[str, ...], Forecast] | None:
        """One flag after the other, each time the one that lowers the peak most, until it fits or none lowers it.

        Adapters are left out: with them another model is trained.
        """
        flags: dict[str, str] = {}
        best: Forecast | None = None
        while best is None or not plan.leaves_room(best):
            choices = {name: choice for name, choice in found.items() if not name.startswith("--lora_rank")}
            if not choices:
                break
            name = min(choices, key=lambda flag: choices[flag][1].peak)
            settings, best = choices[name]
            flags[name.partition(" ")[0]] = name
            found = self.turned(settings, best.peak)
        return None if best is None else (tuple(flags.values()), best)


def _cache_problem(config: RFTConfig, made: Forecast) -> str:
    """Why vLLM or SGLang would not start: its share of the device must hold its weights and one longest response."""
    engine = made.engine
    longest = config.prompt_max_len + config.generate_max_len
    if engine is None or config.engine_type == "hf" or engine.kv_cache >= longest * engine.kv_per_token:
        return ""
    need = f"one response of {longest} tokens needs {longest * engine.kv_per_token / GIB:.2f} GiB: raise it"
    if config.engine_kv_gib is not None:
        return f"engine_kv_gib is {config.engine_kv_gib:g}, and {need}"
    return (
        f"engine_mem_util {config.engine_mem_util:g} leaves {engine.kv_cache / GIB:.2f} GiB beside the engine's "
        f"weights ({engine.weights / GIB:.2f} GiB), and {need}, or --engine_tp_size"
    )


def _device_bytes(config: RFTConfig) -> int:
    if config.plan_device_gib is not None:
        return int(config.plan_device_gib * GIB)
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return _DEFAULT_DEVICE_GIB * GIB


def _changes(config: RFTConfig) -> dict[str, dict[str, Any]]:
    """Flag -> settings, for the knobs that are not turned yet."""
    candidates: dict[str, dict[str, Any]] = {
        "--fsdp": {"fsdp": True},
        "--zero_stage 3": {"zero_stage": 3, "fsdp": config.fsdp},
        "--adam_offload": {"adam_offload": True},
        "--offload_trained": {"offload_trained": True},
        "--offload_frozen": {"offload_frozen": True},
        "--enable_engine_sleep": {"enable_engine_sleep": True},
        "--gradient_checkpointing": {"gradient_checkpointing": True},
        "--micro_train_batch_size 1": {"micro_train_batch_size": 1},
        "--lora_rank 16": {"lora_rank": config.lora_rank or 16, "freeze": ()},
    }
    if config.warm_starts:
        candidates["--warm_start_micro_batch_size 1"] = {"warm_start_micro_batch_size": 1}
    if config.engine_kv_gib is not None:
        smaller = config.engine_kv_gib / 2
        candidates[f"--engine_kv_gib {smaller:g}"] = {"engine_kv_gib": smaller}
    elif config.engine_type != "hf":
        half = config.engine_mem_util / 2
        candidates[f"--engine_mem_util {half:g}"] = {"engine_mem_util": half}
    if config.adam_offload or config.zero_stage == 0:
        candidates.pop("--adam_offload")
    return {flag: c for flag, c in candidates.items() if any(getattr(config, name) != v for name, v in c.items())}


def describe(plan: Plan) -> str:
    """The plan as text: groups, batches, a table of GiB, the verdict and the knobs."""
    config, ranks = plan.config, plan.cluster.ranks
    layout = ParallelLayout(ranks, config.engine_tp_size, local_world_size=min(ranks, config.plan_ranks_per_node))
    per_rank = config.samples_per_step // ranks
    steps = config.updates_per_step
    per_update = (config.train_batch_size or config.samples_per_step) // ranks
    verdict = "fits" if plan.leaves_room(plan.forecast) else "does NOT fit"
    lines = [
        f"{_counted(ranks, 'rank')}: {_counted(len(layout.tp_groups()), 'engine')} of "
        f"{_counted(config.engine_tp_size, 'rank')}; "
        f"{'FSDP2' if config.fsdp else f'ZeRO-{config.zero_stage}'}, {'bf16' if plan.cluster.bf16 else 'fp32'}",
        f"{config.samples_per_step} responses a step, {per_rank} a rank; {_counted(steps, 'optimiser step')} of "
        f"{per_update} responses a rank, {_micro_batches(config, per_update)} of at most "
        f"{update_tokens(config, plan.cluster)} tokens",
        *_warm_start_lines(plan),
        *_engine_lines(plan),
        f"each weight sync sends {plan.forecast.sync_bytes / GIB:.2f} GiB; pinned host memory for what leaves the "
        f"device: {plan.forecast.host_bytes / GIB:.2f} GiB a rank",
        "",
        _table(plan),
        "",
        "with every prompt and response at its longest",
        f"largest: {plan.forecast.peak_phase}, {plan.forecast.peak / GIB:.2f} GiB; a rank has {plan.room / GIB:.2f} "
        f"GiB ({_RESERVED_BYTES / GIB:.0f} GiB are kept free): {verdict}",
    ]
    if plan.cache_problem:
        lines.append(f"the engine does NOT start: {plan.cache_problem}")
    for flag, changed in sorted(plan.knobs.items(), key=lambda item: item[1].peak):
        lines.append(f"  with {flag:<28} {changed.peak / GIB:8.2f} GiB in {changed.peak_phase}")
    if plan.together is not None:
        flags, changed = plan.together
        found = "fits" if plan.leaves_room(changed) else "does NOT fit either"
        lines.append(f"  with {' '.join(flags)}: {changed.peak / GIB:.2f} GiB in {changed.peak_phase}, {found}")
    return "\n".join(lines)


def _counted(number: int, name: str, several: str | None = None) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {several or name + 's'}"


def _engine_lines(plan: Plan) -> list[str]:
    """What an engine's KV cache is for."""
    engine = plan.forecast.engine
    if engine is None:
        return []
    longest = plan.config.prompt_max_len + plan.config.generate_max_len
    at_once = engine.kv_cache // (longest * engine.kv_per_token)
    return [
        f"an engine gets {_counted(engine.responses, 'response')}; its KV cache holds {min(at_once, engine.responses)} "
        f"of them at their longest at a time ({engine.kv_cache // engine.kv_per_token} tokens)"
    ]


def _warm_start_lines(plan: Plan) -> list[str]:
    config, made = plan.config, plan.forecast
    if WARM_START not in made.phases:
        return []
    share = config.warm_start_batch_size // plan.cluster.ranks
    verdict = "fits" if made.total(WARM_START) <= plan.room else "does NOT fit"
    return [
        f"warm start: {share} answers a rank and step, at most {warm_start_tokens(config, plan.cluster)} tokens a "
        f"micro-batch; {made.total(WARM_START) / GIB:.2f} GiB, {verdict}"
    ]


def _micro_batches(config: RFTConfig, responses: int) -> str:
    if config.max_tokens_per_micro_batch is not None:
        longest = config.prompt_max_len + config.generate_max_len
        return f"at most {-(-responses * longest // config.max_tokens_per_micro_batch)} micro-batches"
    return _counted(-(-responses // config.micro_train_batch_size), "micro-batch", "micro-batches")


def _table(plan: Plan) -> str:
    made = plan.forecast
    shown = {name: row for name, row in made.phases.items() if name != "evaluate" or evaluates(plan.config)}
    owners = list(dict.fromkeys(owner for row in shown.values() for owner in row))
    head = ["GiB a rank", *shown]
    rows = [[owner, *(f"{row.get(owner, 0) / GIB:.2f}" for row in shown.values())] for owner in owners]
    rows.append(["all", *(f"{made.total(phase) / GIB:.2f}" for phase in shown)])
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        row[0].ljust(widths[0]) + "".join("  " + cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))
        for row in [head, *rows]
    )
