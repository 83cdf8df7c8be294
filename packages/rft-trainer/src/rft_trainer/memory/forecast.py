"""Bytes that each owner will hold on one rank, from shapes and settings alone."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from rft_engines import Fate, SleepLevel, sleep_contract
from rft_trainer.config import RFTConfig
from rft_trainer.memory.backward import (
    activation_bytes,
    in_flight_bytes,
    update_tokens,
    warm_start_tokens,
    zero_bucket_bytes,
)
from rft_trainer.memory.plan import ENGINE, PHASES, Placement, PlacementPlan
from rft_trainer.memory.shapes import ModelShapes
from rft_trainer.strategy.deepspeed import sums_in_fp32
from rft_trainer.strategy.residency import OPTIMIZER_SUFFIX

ACTOR = "actor"
ACTIVATIONS = "activations"
GRADIENTS = "gradients"
IN_FLIGHT = "gradients in flight"
KV_CACHE = "kv cache"
ENGINE_WEIGHTS = "engine weights"
GATHERED = "gathered weights"
GRAPHS = "cuda graphs"
EXPERIENCES = "experiences"
AVERAGE = "weight average"
BUCKET = "reduce bucket"
WARM_START = "warm_start"
"""The phase of the supervised steps, before any other model and the engine are there."""
_COMPUTING = ("actor_log_probs", "reference", "critic_values", "teacher", "update", "sync")
GIB = 2**30
_FP32 = 4
_HF_KV_BYTES = 4 << 30
# Of a response token in an experience: its id, version, mask, and seven columns in fp32 (engine, old, reference and
# teacher log-probabilities, values, advantages, returns). Of a prompt token: its id.
_RESPONSE_TOKEN_BYTES = 8 + 8 + 1 + 7 * _FP32
_PROMPT_TOKEN_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where a run will be."""

    ranks: int
    device_bytes: int | None
    bf16: bool


@dataclass(frozen=True)
class StateBytes:
    """One model's bytes on one rank: weights at rest, gradients, optimiser, and whole copies while it computes."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int


def trained_bytes(shapes: ModelShapes, config: RFTConfig, cluster: Cluster) -> StateBytes:
    """Of a model under training."""
    if config.fsdp:
        return _fsdp_bytes(shapes, config, cluster)
    return _zero_bytes(shapes, config, cluster)


def _fsdp_bytes(shapes: ModelShapes, config: RFTConfig, cluster: Cluster) -> StateBytes:
    compute = 2 if cluster.bf16 else _FP32
    # Under adapters nothing trains the weights, and they are held in the dtype of the computation.
    frozen = compute if config.lora_rank else _FP32
    ranks = config.fsdp_shard_size or cluster.ranks
    trained_shard = sum(p.shard_numel(ranks) for p in shapes.parameters if p.trained)
    frozen_shard = sum(p.shard_numel(ranks) for p in shapes.parameters if not p.trained)
    steps = sum(p.trained for p in shapes.parameters)
    # Outside the blocks stays whole until backward; of blocks one computes and the next is fetched.
    blocks = 2 * shapes.largest_block_numel if config.fsdp_reshard else shapes.numel - shapes.block_numel(-1)
    gathered = compute * (shapes.block_numel(-1) + blocks)
    if config.fsdp_cpu_offload:
        return StateBytes(shapes.buffer_bytes, 0, 0, gathered)
    return StateBytes(
        weights=_FP32 * trained_shard + frozen * frozen_shard + shapes.buffer_bytes,
        gradients=_FP32 * trained_shard,
        optimizer=_FP32 * (2 * trained_shard + steps),
        gathered=gathered if ranks > 1 or cluster.bf16 else 0,
    )


def _zero_bytes(shapes: ModelShapes, config: RFTConfig, cluster: Cluster) -> StateBytes:
    compute = 2 if cluster.bf16 else _FP32
    stage, ranks = config.zero_stage, cluster.ranks
    trained, whole = shapes.trained_numel, shapes.numel
    part = -(-trained // ranks)
    weights = compute * (-(-whole // ranks) if stage == 3 else whole) + shapes.buffer_bytes
    exact = cluster.bf16 and sums_in_fp32(stage=stage, adam_offload=config.adam_offload)
    # Below stage 2 whole gradients are held until they are reduced. Sums in fp32 beside bfloat16 are exactly a part.
    held = trained if stage < 2 else part if stage == 3 or exact else _partition_gradients(shapes, ranks)
    gradients = (_FP32 if exact else compute) * held
    if stage == 0:
        optimizer = _FP32 * 2 * trained + (_FP32 * trained if cluster.bf16 else 0)
    else:
        # Two moments and an fp32 master, which stages 1 to 3 keep in fp32 runs too.
        optimizer = 0 if config.adam_offload else _FP32 * 3 * part
    gathered = compute * (shapes.block_numel(-1) + 2 * shapes.largest_block_numel) if stage == 3 else 0
    return StateBytes(weights, gradients, optimizer, gathered)


def _partition_gradients(shapes: ModelShapes, ranks: int) -> int:
    """Elements of the gradients that one rank keeps in stage 2, the most of any rank.

    Matrices and vectors are two groups, each cut into equal parts; a tensor across a cut is kept whole on both sides.
    """
    held = [0] * ranks
    for matrices in (True, False):
        numels = [p.numel for p in shapes.parameters if p.trained and (len(p.shape) >= 2) is matrices]
        part = max(1, -(-sum(numels) // ranks))
        start = 0
        for numel in numels:
            for rank in range(start // part, (start + numel - 1) // part + 1):
                held[rank] += numel
            start += numel
    return max(held)


def frozen_bytes(shapes: ModelShapes, config: RFTConfig, cluster: Cluster) -> int:
    """Of a model that is only scored, at rest."""
    compute = 2 if cluster.bf16 else _FP32
    if config.fsdp:
        ranks = config.fsdp_shard_size or cluster.ranks
        return _FP32 * sum(p.shard_numel(ranks) for p in shapes.parameters) + shapes.buffer_bytes
    if config.zero_stage == 3:
        return compute * -(-shapes.numel // cluster.ranks) + shapes.buffer_bytes
    return compute * shapes.numel + shapes.buffer_bytes


def average_bytes(shapes: ModelShapes, config: RFTConfig, cluster: Cluster) -> int:
    """Of the fp32 average of the trained weights, which lies beside this rank's share of them."""
    if not config.fsdp:
        return _FP32 * shapes.trained_numel
    if config.fsdp_cpu_offload:
        return 0
    ranks = config.fsdp_shard_size or cluster.ranks
    return _FP32 * sum(p.shard_numel(ranks) for p in shapes.parameters if p.trained)


def experience_bytes(config: RFTConfig, cluster: Cluster) -> int:
    """Of one rank's share of a step's responses at their longest, with every column."""
    responses = -(-config.samples_per_step // cluster.ranks)
    return responses * (config.prompt_max_len * _PROMPT_TOKEN_BYTES + config.generate_max_len * _RESPONSE_TOKEN_BYTES)


@dataclass(frozen=True, kw_only=True)
class EngineBytes:
    """The rollout engine on one rank, for a checkpoint without adapters.

    weights: of this rank's slices.
    kv_cache: that it takes.
    kv_per_token: of one token of one response.
    responses: that the ranks of the engine generate together in one round.
    """

    weights: int
    kv_cache: int
    kv_per_token: int
    responses: int


def engine_bytes(base: ModelShapes, config: RFTConfig, cluster: Cluster) -> EngineBytes:
    """Of the engine that generates with the checkpoint `base`."""
    size, split = _engine_itemsize(base, config, cluster), config.engine_tp_size
    weights = size * -(-base.numel // split)
    # A rank has whole heads, and one at least: more ranks than heads hold some of them twice.
    per_token = size * (base.kv_numel_per_token // base.kv_heads) * -(-base.kv_heads // split)
    rows = -(-config.samples_per_step // cluster.ranks) * split
    wanted = rows * (config.prompt_max_len + config.generate_max_len) * per_token
    if config.engine_type == "hf":
        taken = min(wanted, config.engine_kv_bytes or _HF_KV_BYTES)
    elif config.engine_kv_bytes is not None:
        taken = config.engine_kv_bytes
    elif cluster.device_bytes is None:
        taken = wanted
    else:
        # vLLM and SGLang fill their share whatever the rollout needs.
        taken = max(0, int(config.engine_mem_util * cluster.device_bytes) - weights)
    return EngineBytes(weights=weights, kv_cache=taken, kv_per_token=per_token, responses=rows)


def _engine_itemsize(base: ModelShapes, config: RFTConfig, cluster: Cluster) -> int:
    """Bytes of an engine's element: vLLM and SGLang are started in the dtype that the actor computes in."""
    if config.engine_type == "hf":
        return base.checkpoint_itemsize
    return 2 if cluster.bf16 else _FP32


@dataclass(frozen=True)
class Forecast:
    """Bytes of one rank by phase and owner, and of one weight sync.

    phases: phase -> owner -> bytes on the device; phases that the run does not have are left out.
    sync_bytes: sent at each sync.
    host_bytes: pinned mirrors of what leaves the device.
    engine: its parts; None where it was not asked for.
    """

    phases: Mapping[str, Mapping[str, int]]
    sync_bytes: int
    host_bytes: int
    engine: EngineBytes | None = None

    def total(self, phase: str) -> int:
        """All owners of a phase."""
        return sum(self.phases[phase].values())

    @property
    def peak_phase(self) -> str:
        """The phase that holds most."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes of that phase."""
        return self.total(self.peak_phase)


@dataclass(frozen=True, kw_only=True)
class Models:
    """Shapes of everything a run holds.

    trained: role -> model with its adapters; `actor` is one.
    frozen: role -> model that is only scored and has weights of its own.
    base: the actor's checkpoint, which the engine holds.
    warm_start: the policy of the supervised steps, without adapters; None where none are taken.
    """

    trained: Mapping[str, ModelShapes]
    frozen: Mapping[str, ModelShapes]
    base: ModelShapes
    warm_start: ModelShapes | None = None


def warm_start_row(shapes: ModelShapes, config: RFTConfig, cluster: Cluster) -> dict[str, int]:
    """Owner -> bytes on one rank during supervised steps on a model of these shapes, which is alone on the device."""
    state = trained_bytes(shapes, replace(config, lora_rank=0), cluster)
    activations = activation_bytes(shapes, config, cluster, tokens=warm_start_tokens(config, cluster))
    row = {
        ACTOR: state.weights,
        ACTOR + OPTIMIZER_SUFFIX: state.optimizer,
        GATHERED: state.gathered,
        GRADIENTS: state.gradients,
        IN_FLIGHT: in_flight_bytes(shapes, config, cluster, freed=state.gathered + activations),
        ACTIVATIONS: activations,
        BUCKET: zero_bucket_bytes(cluster) if _keeps_bucket(config) else 0,
    }
    return {owner: size for owner, size in row.items() if size}


def forecast(config: RFTConfig, cluster: Cluster, plan: PlacementPlan, models: Models) -> Forecast:
    """What one rank will hold in each phase."""
    held: dict[str, int] = {}
    gathered = gradients = activations = in_flight = 0
    tokens = update_tokens(config, cluster)
    for role, shapes in models.trained.items():
        state = trained_bytes(shapes, config, cluster)
        held[role], held[role + OPTIMIZER_SUFFIX] = state.weights, state.optimizer
        gathered, gradients = max(gathered, state.gathered), gradients + state.gradients
        kept = activation_bytes(shapes, config, cluster, tokens=tokens)
        activations = max(activations, kept)
        in_flight = max(in_flight, in_flight_bytes(shapes, config, cluster, freed=state.gathered + kept))
    held.update({role: frozen_bytes(shapes, config, cluster) for role, shapes in models.frozen.items()})
    if _keeps_bucket(config):
        held[BUCKET] = len(models.trained) * zero_bucket_bytes(cluster)
    if config.ema_decay > 0:
        held[AVERAGE] = average_bytes(models.trained[ACTOR], config, cluster)
    rollout = engine_bytes(models.base, config, cluster)
    weights, kv = rollout.weights, rollout.kv_cache
    phases: dict[str, dict[str, int]] = {}
    if models.warm_start is not None:
        phases[WARM_START] = warm_start_row(models.warm_start, config, cluster)
    for phase in (phase for phase in PHASES if _happens(phase, config, held)):
        row = {owner: size for owner, size in held.items() if plan.placement(owner, phase) is not Placement.HOST}
        engine = plan.placement(ENGINE, phase)
        if engine is not Placement.HOST:
            row[ENGINE_WEIGHTS] = weights
        if engine is Placement.DEVICE or (engine is Placement.ANY and not config.enable_engine_sleep):
            row[KV_CACHE] = kv
        if phase in _COMPUTING:
            row[GATHERED] = gathered
        if phase == "update":
            row |= {GRADIENTS: gradients, IN_FLIGHT: in_flight, ACTIVATIONS: activations}
            row[EXPERIENCES] = experience_bytes(config, cluster) if config.replay_on_device else 0
        phases[phase] = {owner: size for owner, size in row.items() if size}
    leaving = (o for o in held if any(plan.placement(o, phase) is Placement.HOST for phase in PHASES))
    on_host = sum(held[owner] for owner in leaving) + (weights if _engine_backs_up(config) else 0)
    return Forecast(phases, _sent_bytes(config, cluster, models), on_host, rollout)


def _keeps_bucket(config: RFTConfig) -> bool:
    """Whether each trained model's optimiser keeps the bucket in which it reduces gradients."""
    return not config.fsdp and config.zero_stage == 3


def _happens(phase: str, config: RFTConfig, owners: Collection[str]) -> bool:
    """Whether a run with these owners has the phase."""
    if phase == "reference":
        # The actor itself without its adapters, where no model of its own is there.
        return config.init_kl_coef > 0
    return phase not in ("critic_values", "teacher") or phase.partition("_")[0] in owners


def evaluates(config: RFTConfig) -> bool:
    """Whether the configuration names a set to evaluate on; a program of one's own may bring another."""
    return config.eval_dataset is not None or bool(config.eval_sets)


def _sent_bytes(config: RFTConfig, cluster: Cluster, models: Models) -> int:
    """Of one update."""
    engine = _engine_itemsize(models.base, config, cluster)
    if not config.sends_adapter_only:
        return models.base.numel * engine
    # The embedded engine takes the factors as they are trained, the others in their own dtype.
    size = _FP32 if config.engine_type == "hf" else engine
    return models.trained[ACTOR].trained_numel * size


def _engine_backs_up(config: RFTConfig) -> bool:
    """Whether the engine's weights go to the host in a sleep that no full update follows."""
    if not config.enable_engine_sleep:
        return False
    released = sleep_contract(config.engine_type).effect(SleepLevel.KEEP_WEIGHTS).weights is Fate.RELEASED
    return released and (config.sends_adapter_only or evaluates(config))
