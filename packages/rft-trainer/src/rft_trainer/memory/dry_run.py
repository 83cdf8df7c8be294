"""A run on paper: groups, micro-batches, bytes by phase, whether they fit, and what each knob would change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rft_dist import ParallelLayout
from rft_trainer.algorithms import AdvantageEstimator
from rft_trainer.config import RFTConfig
from rft_trainer.config.distribution import computes_in_bf16
from rft_trainer.errors import ConfigurationError, UnsupportedCombination
from rft_trainer.memory.build import models_of, placement_plan
from rft_trainer.memory.forecast import GIB, Cluster, Forecast, forecast
from rft_trainer.memory.shapes import ModelShapes, model_shapes, read_config

_DEFAULT_DEVICE_GIB = 80
_RESERVED_BYTES = 2 * GIB
"""Left for the context, communication buffers and the allocator's rounding."""


@dataclass(frozen=True)
class Plan:
    """What a dry run found out.

    knobs: flag -> forecast with it, for flags that lower the peak.
    """

    config: RFTConfig
    cluster: Cluster
    forecast: Forecast
    knobs: Mapping[str, Forecast]

    @property
    def room(self) -> int:
        """Bytes that a rank may fill."""
        assert self.cluster.device_bytes is not None
        return self.cluster.device_bytes - _RESERVED_BYTES

    @property
    def fits(self) -> bool:
        """Whether every phase stays within the device."""
        return self.forecast.peak <= self.room


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
    folders = [config.pretrain, config.critic_pretrain, config.teacher]
    files = {folder: read_config(folder) for folder in folders if folder is not None}
    made_before: dict[Any, ModelShapes] = {}

    def shapes(found: Any, **options: Any) -> ModelShapes:
        key = (id(found), *sorted(options.items()))
        if key not in made_before:
            made_before[key] = model_shapes(found, **options)
        return made_before[key]

    made = _forecast(config, cluster, files, shapes)
    knobs: dict[str, Forecast] = {}
    for name, changes in _changes(config).items():
        try:
            turned = replace(config, **changes)
            check(turned)
            changed = _forecast(turned, cluster, files, shapes)
        except (ConfigurationError, UnsupportedCombination):
            continue  # it does not go with the run's other settings, or not without an extra: no advice
        if changed.peak < made.peak:
            knobs[name] = changed
    return Plan(config, cluster, made, knobs)


def _device_bytes(config: RFTConfig) -> int:
    if config.plan_device_gib is not None:
        return int(config.plan_device_gib * GIB)
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return _DEFAULT_DEVICE_GIB * GIB


def _forecast(
    config: RFTConfig, cluster: Cluster, files: Mapping[str, Any], shapes: Callable[..., ModelShapes]
) -> Forecast:
    assert config.pretrain is not None
    frozen: dict[str, Any] = {}
    if config.init_kl_coef > 0 and (config.lora_rank == 0 or config.separate_reference):
        frozen["reference"] = files[config.pretrain]
    if config.teacher is not None:
        frozen["teacher"] = files[config.teacher]
    critic = None
    if AdvantageEstimator.get(config.advantage_estimator).needs_critic:
        critic = files[config.critic_pretrain or config.pretrain]
    models = models_of(config, files[config.pretrain], critic=critic, frozen=frozen, shapes=shapes)
    plan = placement_plan(config, tuple(models.trained), tuple(models.frozen))
    return forecast(config, cluster, plan, models)


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
    lines = [
        f"{ranks} ranks: {len(layout.tp_groups())} engines of {config.engine_tp_size} ranks; "
        f"{'FSDP2' if config.fsdp else f'ZeRO-{config.zero_stage}'}, {'bf16' if plan.cluster.bf16 else 'fp32'}",
        f"{config.samples_per_step} responses a step, {per_rank} a rank; {steps} optimiser steps of {per_update} "
        f"responses a rank, {_micro_batches(config, per_update)} micro-batches each",
        f"each weight sync sends {plan.forecast.sync_bytes / GIB:.2f} GiB; pinned host memory for what leaves the "
        f"device: {plan.forecast.host_bytes / GIB:.2f} GiB a rank",
        "",
        _table(plan.forecast),
        "",
        f"largest: {plan.forecast.peak_phase}, {plan.forecast.peak / GIB:.2f} GiB; a rank has {plan.room / GIB:.2f} "
        f"GiB ({_RESERVED_BYTES / GIB:.0f} GiB are kept free): {'fits' if plan.fits else 'does NOT fit'}",
    ]
    for flag, changed in sorted(plan.knobs.items(), key=lambda item: item[1].peak):
        lines.append(f"  with {flag:<28} {changed.peak / GIB:8.2f} GiB in {changed.peak_phase}")
    return "\n".join(lines)


def _micro_batches(config: RFTConfig, responses: int) -> str:
    if config.max_tokens_per_micro_batch is not None:
        longest = config.prompt_max_len + config.generate_max_len
        return f"at most {-(-responses * longest // config.max_tokens_per_micro_batch)}"
    return str(-(-responses // config.micro_train_batch_size))


def _table(made: Forecast) -> str:
    owners = list(dict.fromkeys(owner for row in made.phases.values() for owner in row))
    head = ["GiB a rank", *made.phases]
    rows = [[owner, *(f"{row.get(owner, 0) / GIB:.2f}" for row in made.phases.values())] for owner in owners]
    rows.append(["all", *(f"{made.total(phase) / GIB:.2f}" for phase in made.phases)])
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        row[0].ljust(widths[0]) + "".join("  " + cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))
        for row in [head, *rows]
    )
