"""What one backward holds beside the model: activations of a micro-batch, and gradients on their way."""

from typing import TYPE_CHECKING

from rft_trainer.config import RFTConfig
from rft_trainer.memory.shapes import ModelShapes

if TYPE_CHECKING:
    from rft_trainer.memory.forecast import Cluster

_FP32 = 4
_HEAD_CHUNK = 1024
# Hidden-sized tensors that one block keeps for backward (norms, q, k, v, attention, residuals), beside its MLP's.
_KEPT_PER_BLOCK = 10
_KEPT_BY_MLP = 4
_ZERO_BUCKET = 500_000_000
"""Elements of DeepSpeed's `reduce_bucket_size`, which we leave at its default; allocated whole whatever the model."""


def largest_micro_batch(longest: int, *, share: int, responses: int, max_tokens: int | None) -> int:
    """Tokens of a rank's largest micro-batch.

    Args:
        longest: tokens of the longest prompt with its response.
        share: responses of the rank for one optimiser step.
        responses: of a micro-batch.
        max_tokens: its budget instead of `responses`; one longer sequence is a micro-batch of its own.
    """
    if max_tokens is None:
        return longest * min(responses, share)
    return min(max(max_tokens, longest), longest * share)


def update_tokens(config: RFTConfig, cluster: "Cluster") -> int:
    """Tokens of the largest micro-batch of an update."""
    return largest_micro_batch(
        config.prompt_max_len + config.generate_max_len,
        share=-(-(config.train_batch_size or config.samples_per_step) // cluster.ranks),
        responses=config.micro_train_batch_size,
        max_tokens=config.max_tokens_per_micro_batch,
    )


def warm_start_tokens(config: RFTConfig, cluster: "Cluster") -> int:
    """Tokens of the largest micro-batch of the supervised steps, whose answers are no longer than a rollout."""
    return largest_micro_batch(
        config.prompt_max_len + config.generate_max_len,
        share=-(-config.warm_start_batch_size // cluster.ranks),
        responses=config.warm_start_micro_batch_size,
        max_tokens=config.warm_start_max_tokens,
    )


def activation_bytes(shapes: ModelShapes, config: RFTConfig, cluster: "Cluster", *, tokens: int) -> int:
    """Of a micro-batch of `tokens`, forward and backward; an estimate, unlike the rest.

    Attention keeps no [tokens, tokens] tensor, and logits exist in chunks of `1024` tokens in fp32.
    """
    size = 2 if cluster.bf16 else _FP32
    per_block = tokens * size * (_KEPT_PER_BLOCK * shapes.hidden + _KEPT_BY_MLP * shapes.intermediate)
    if config.gradient_checkpointing:
        kept = tokens * size * shapes.hidden * shapes.layers + per_block
    else:
        # Below the lowest trained weight nothing is kept.
        kept = per_block * shapes.blocks_under_gradient
    return kept + 2 * _FP32 * min(tokens, _HEAD_CHUNK) * shapes.vocabulary


def reduced_bytes(shapes: ModelShapes, config: RFTConfig, cluster: "Cluster") -> tuple[int, int]:
    """(the largest block, what lies outside the blocks): gradients that are whole on a rank while they are reduced.

    FSDP2 reduces each block behind its backward, and what lies outside behind all of them: whole gradients in the dtype
    of the computation, and the buffer in fp32 that they are sent from, with the padding of equal shards.
    """
    ranks = config.fsdp_shard_size or cluster.ranks
    compute = 2 if cluster.bf16 else _FP32
    numels: dict[int, int] = {}
    for p in (p for p in shapes.parameters if p.trained):
        held = compute * p.numel + _FP32 * ranks * p.shard_numel(ranks)
        numels[p.block] = numels.get(p.block, 0) + held
    outside = numels.pop(-1, 0)
    return max(numels.values(), default=0), outside


def in_flight_bytes(shapes: ModelShapes, config: RFTConfig, cluster: "Cluster", *, freed: int) -> int:
    """Of gradients on their way to the shards, beside what else a backward holds.

    freed: bytes of activations and gathered weights, which are gone when what lies outside the blocks is reduced.
    """
    if not config.fsdp:
        # Stage 3 holds its bucket all the time, stage 0 needs none.
        buckets = (2 if config.zero_overlap else 1) if config.zero_stage in (1, 2) else 0
        return buckets * zero_bucket_bytes(cluster)
    block, outside = reduced_bytes(shapes, config, cluster)
    compute = 2 if cluster.bf16 else _FP32
    # The gradient of the head waits from the beginning; where head and embedding are one, that of both.
    own = [p for p in shapes.parameters if p.trained and p.block < 0]
    head = [p for p in shapes.behind_blocks if p.trained]
    waiting = head if any(len(p.shape) > 1 for p in head) else own
    return max(block + compute * sum(p.numel for p in waiting), outside - freed)


def zero_bucket_bytes(cluster: "Cluster") -> int:
    """Of one bucket in which ZeRO collects gradients before it reduces them."""
    return (2 if cluster.bf16 else _FP32) * _ZERO_BUCKET
