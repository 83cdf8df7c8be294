"""Bytes that each owner will hold on one rank, from shapes and settings alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from rft_engines import Fate, SleepLevel, sleep_contract
from rft_trainer.config import RFTConfig
from rft_trainer.memory.plan import ENGINE, PHASES, Placement, PlacementPlan
from rft_trainer.memory.shapes import ModelShapes
from rft_trainer.strategy.deepspeed import sums_in_fp32
from rft_trainer.strategy.residency import OPTIMIZER_SUFFIX

ACTIVATIONS = "activations"
GRADIENTS = "gradients"
KV_CACHE = "kv cache"
ENGINE_WEIGHTS = "engine weights"
GATHERED = "gathered weights"
GRAPHS = "cuda graphs"
EXPERIENCES = "experiences"
AVERAGE = "weight average"
_COMPUTING = ("actor_log_probs", "reference", "critic_values", "teacher", "update", "sync")
GIB = 2**30
_FP32 = 4
_HEAD_CHUNK = 1024
_HF_KV_BYTES = 4 << 30
# Of a response token in an experience: its id, version, mask, and seven columns in fp32 (engine, old, reference and
# teacher log-probabilities, values, advantages, returns). Of a prompt token: its id.
_RESPONSE_TOKEN_BYTES = 8 + 8 + 1 + 7 * _FP32
_PROMPT_TOKEN_BYTES = 8
# Hidden-sized tensors that one block keeps for backward (norms, q, k, v, attention, residuals), beside its MLP's.
_KEPT_PER_BLOCK = 10
_KEPT_BY_MLP = 4


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


def activation_bytes(shapes: ModelShapes, config: RFTConfig, cluster: Cluster) -> int:
    """Of one micro-batch at its longest, forward and backward; an estimate, unlike the rest.

    Attention keeps no [tokens, tokens] tensor, and logits exist in chunks of `1024` tokens in fp32.
    """
    size = 2 if cluster.bf16 else _FP32
    longest = config.prompt_max_len + config.generate_max_len
    tokens = config.max_tokens_per_micro_batch or config.micro_train_batch_size * longest
    per_block = tokens * size * (_KEPT_PER_BLOCK * shapes.hidden + _KEPT_BY_MLP * shapes.intermediate)
    if config.gradient_checkpointing:
        kept = tokens * size * shapes.hidden * shapes.layers + per_block
    else:
        kept = per_block * shapes.layers
    return kept + 2 * _FP32 * min(tokens, _HEAD_CHUNK) * shapes.vocabulary


def engine_bytes(base: ModelShapes, config: RFTConfig, cluster: Cluster) -> tuple[int, int]:
    """(weights, KV cache) of the rollout engine on one rank, for a checkpoint without adapters."""
    size, split = base.checkpoint_itemsize, config.engine_tp_size
    weights = size * -(-base.numel // split)
    longest = config.prompt_max_len + config.generate_max_len
    rows = -(-config.samples_per_step // cluster.ranks) * split
    wanted = rows * longest * size * -(-base.kv_numel_per_token // split)
    if config.engine_type == "hf":
        return weights, min(wanted, config.engine_kv_bytes or _HF_KV_BYTES)
    if config.engine_kv_bytes is not None:
        return weights, config.engine_kv_bytes
    if cluster.device_bytes is None:
        return weights, wanted
    # vLLM and SGLang fill their share whatever the rollout needs.
    return weights, max(0, int(config.engine_mem_util * cluster.device_bytes) - weights)


@dataclass(frozen=True)
class Forecast:
    """Bytes of one rank by phase and owner, and of one weight sync.

    phases: phase -> owner -> bytes on the device.
    sync_bytes: sent at each sync.
    host_bytes: pinned mirrors of what leaves the device.
    """

    phases: Mapping[str, Mapping[str, int]]
    sync_bytes: int
    host_bytes: int

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
    """

    trained: Mapping[str, ModelShapes]
    frozen: Mapping[str, ModelShapes]
    base: ModelShapes


def forecast(config: RFTConfig, cluster: Cluster, plan: PlacementPlan, models: Models) -> Forecast:
    """What one rank will hold in each phase."""
    held: dict[str, int] = {}
    gathered = gradients = activations = 0
    for role, shapes in models.trained.items():
        state = trained_bytes(shapes, config, cluster)
        held[role], held[role + OPTIMIZER_SUFFIX] = state.weights, state.optimizer
        gathered, gradients = max(gathered, state.gathered), gradients + state.gradients
        activations = max(activations, activation_bytes(shapes, config, cluster))
    held.update({role: frozen_bytes(shapes, config, cluster) for role, shapes in models.frozen.items()})
    if config.ema_decay > 0:
        held[AVERAGE] = average_bytes(models.trained["actor"], config, cluster)
    weights, kv = engine_bytes(models.base, config, cluster)
    phases: dict[str, dict[str, int]] = {}
    absent = {role for role in ("critic_values", "teacher") if role.partition("_")[0] not in held}
    for phase in (phase for phase in PHASES if phase not in absent):
        row = {owner: size for owner, size in held.items() if plan.placement(owner, phase) is not Placement.HOST}
        engine = plan.placement(ENGINE, phase)
        if engine is not Placement.HOST:
            row[ENGINE_WEIGHTS] = weights
        if engine is Placement.DEVICE or (engine is Placement.ANY and not config.enable_engine_sleep):
            row[KV_CACHE] = kv
        if phase in _COMPUTING:
            row[GATHERED] = gathered
        if phase == "update":
            row |= {GRADIENTS: gradients, ACTIVATIONS: activations}
            row[EXPERIENCES] = experience_bytes(config, cluster) if config.replay_on_device else 0
        phases[phase] = {owner: size for owner, size in row.items() if size}
    leaving = (o for o in held if any(plan.placement(o, phase) is Placement.HOST for phase in PHASES))
    on_host = sum(held[owner] for owner in leaving) + (weights if _engine_backs_up(config) else 0)
    return Forecast(phases, _sent_bytes(config, models), on_host)


def _sent_bytes(config: RFTConfig, models: Models) -> int:
    """Of one update."""
    if not config.sends_adapter_only:
        return models.base.numel * models.base.checkpoint_itemsize
    # The embedded engine takes the factors as they are trained, the others in their own dtype.
    size = _FP32 if config.engine_type == "hf" else models.base.checkpoint_itemsize
    return models.trained["actor"].trained_numel * size


def _engine_backs_up(config: RFTConfig) -> bool:
    """Whether the engine's weights go to the host in a sleep that no full update follows."""
    if not config.enable_engine_sleep:
        return False
    released = sleep_contract(config.engine_type).effect(SleepLevel.KEEP_WEIGHTS).weights is Fate.RELEASED
    evaluates = config.eval_dataset is not None or bool(config.eval_sets)
    return released and (config.sends_adapter_only or evaluates)
