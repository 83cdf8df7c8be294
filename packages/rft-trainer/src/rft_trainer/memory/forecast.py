"""Bytes that each owner will hold on one rank, from shapes and settings alone."""

from dataclasses import dataclass

from rft_trainer.config import RFTConfig
from rft_trainer.memory.plan import ENGINE, PHASES, Placement, PlacementPlan
from rft_trainer.memory.shapes import ModelShapes
from rft_trainer.strategy.residency import OPTIMIZER_SUFFIX

ACTIVATIONS = "activations"
GRADIENTS = "gradients"
KV_CACHE = "kv cache"
ENGINE_WEIGHTS = "engine weights"
_FP32 = 4
_HEAD_CHUNK = 1024
_HF_KV_BYTES = 4 << 30
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
    trained_shard = sum(p.shard_numel(cluster.ranks) for p in shapes.parameters if p.trained)
    frozen_shard = sum(p.shard_numel(cluster.ranks) for p in shapes.parameters if not p.trained)
    steps = sum(p.trained for p in shapes.parameters)
    # Outside the blocks stays whole until backward; of blocks one computes and the next is fetched.
    gathered = compute * (shapes.block_numel(-1) + 2 * shapes.largest_block_numel)
    return StateBytes(
        weights=_FP32 * trained_shard + frozen * frozen_shard + shapes.buffer_bytes,
        gradients=_FP32 * trained_shard,
        optimizer=_FP32 * (2 * trained_shard + steps),
        gathered=gathered if cluster.ranks > 1 or cluster.bf16 else 0,
    )


def _zero_bytes(shapes: ModelShapes, config: RFTConfig, cluster: Cluster) -> StateBytes:
    compute = 2 if cluster.bf16 else _FP32
    stage, ranks = config.zero_stage, cluster.ranks
    trained, whole = shapes.trained_numel, shapes.numel
    part = -(-trained // ranks)
    weights = compute * (-(-whole // ranks) if stage == 3 else whole) + shapes.buffer_bytes
    gradients = compute * (part if stage >= 2 else trained)
    if stage == 0:
        optimizer = _FP32 * 2 * trained + (_FP32 * trained if cluster.bf16 else 0)
    else:
        # Two moments and an fp32 master, which stages 1 to 3 keep in fp32 runs too.
        optimizer = 0 if config.adam_offload else _FP32 * 3 * part
    gathered = compute * (shapes.block_numel(-1) + 2 * shapes.largest_block_numel) if stage == 3 else 0
    return StateBytes(weights, gradients, optimizer, gathered)


def frozen_bytes(shapes: ModelShapes, config: RFTConfig, cluster: Cluster) -> int:
    """Of a model that is only scored, at rest."""
    compute = 2 if cluster.bf16 else _FP32
    if config.fsdp:
        return _FP32 * sum(p.shard_numel(cluster.ranks) for p in shapes.parameters) + shapes.buffer_bytes
    if config.zero_stage == 3:
        return compute * -(-shapes.numel // cluster.ranks) + shapes.buffer_bytes
    return compute * shapes.numel + shapes.buffer_bytes


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
    size = 2 if cluster.bf16 else _FP32
    weights = size * -(-base.numel // config.engine_tp_size)
    longest = config.prompt_max_len + config.generate_max_len
    rows = config.samples_per_step // cluster.ranks * config.engine_tp_size
    wanted = rows * longest * base.kv_bytes_per_token * size // 2 // config.engine_tp_size
    if config.engine_type == "hf":
        return weights, min(wanted, _HF_KV_BYTES)
    if cluster.device_bytes is None:
        return weights, wanted
    # vLLM and SGLang fill their share whatever the rollout needs.
    return weights, max(0, int(config.engine_mem_util * cluster.device_bytes) - weights)


@dataclass(frozen=True)
class Forecast:
    """Bytes of one rank by phase and owner, and of one weight sync.

    phases: phase -> owner -> bytes on the device.
    sync_bytes: sent at each sync.
    """

    phases: dict[str, dict[str, int]]
    sync_bytes: int

    def total(self, phase: str) -> int:
        """All owners of a phase."""
        return sum(self.phases[phase].values())

    @property
    def peak_phase(self) -> str:
        """The phase that holds most."""
        return max(self.phases, key=self.total)


def forecast(
    config: RFTConfig, cluster: Cluster, plan: PlacementPlan, actor: ModelShapes, base: ModelShapes, *, frozen: int
) -> Forecast:
    """What one rank will hold in each phase.

    Args:
        config: the run's settings.
        cluster: ranks, device, precision.
        plan: who is where in which phase.
        actor: with its adapters.
        base: the checkpoint, which reference and engine hold.
        frozen: number of models that are only scored and have weights of their own.
    """
    state = trained_bytes(actor, config, cluster)
    weights, kv = engine_bytes(base, config, cluster)
    scored = frozen_bytes(base, config, cluster) * frozen
    phases: dict[str, dict[str, int]] = {}
    for phase in PHASES:
        held = {"actor": state.weights, "actor" + OPTIMIZER_SUFFIX: state.optimizer, "reference": scored}
        row = {
            owner: size for owner, size in held.items() if size and plan.placement(owner, phase) is not Placement.HOST
        }
        awake = plan.placement(ENGINE, phase)
        if awake is not Placement.HOST or not config.enable_engine_sleep:
            row[ENGINE_WEIGHTS] = weights
        if awake is Placement.DEVICE or (awake is Placement.ANY and not config.enable_engine_sleep):
            row[KV_CACHE] = kv
        if phase in ("update", "actor_log_probs", "reference", "sync"):
            row["gathered weights"] = state.gathered
        if phase == "update":
            row["actor" + OPTIMIZER_SUFFIX] = state.optimizer
            row[GRADIENTS] = state.gradients
            row[ACTIVATIONS] = activation_bytes(actor, config, cluster)
        phases[phase] = {owner: size for owner, size in row.items() if size}
    return Forecast(phases, base.numel * (2 if cluster.bf16 else _FP32))
