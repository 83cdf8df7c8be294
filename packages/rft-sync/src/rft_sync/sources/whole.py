"""Sources for full-weight training: plain and DDP modules, FSDP2, DeepSpeed ZeRO."""

from collections.abc import Sequence

from torch import nn

from rft_sync.errors import UnsupportedCombination
from rft_sync.live import check_sendable, is_kind, live_tensors, tensor_trace, unwrap
from rft_sync.partition import Partition, Redistributed, placement_of
from rft_sync.sources.assembly import CheckpointSource, DtypePolicy, ExportTensor


def _export_all(model: nn.Module) -> tuple[Sequence[ExportTensor], Sequence[str]]:
    for name, module in model.named_modules():
        if is_kind(module, "BaseTunerLayer", "AuxiliaryTrainingWrapper"):
            raise UnsupportedCombination(
                f"adapter layer {name} and a full-weight source: use source_for, MergedLoRASource or AdapterSource",
                [name],
            )
    found, skipped = live_tensors(model)
    return [ExportTensor(live.name, (live,)) for live in found], skipped


def reshard(model: nn.Module) -> None:
    """Free FSDP2's gathered copies, which a forward without backward leaves in the root. No communication."""
    for module in model.modules():
        if is_kind(module, "FSDPModule"):
            module.reshard()  # type: ignore[operator]


class ModuleSource(CheckpointSource):
    """Weights of a module that every rank holds whole: plain, DDP, compiled. `gather` needs no communication.

    Args:
        model: The module or its wrapper.
        dtype: Engine dtype, see `CheckpointSource`.
        keep_fp32: Names never cast.

    Raises:
        UnsupportedCombination: The module is sharded; use `source_for`.
    """

    def __init__(self, model: nn.Module, *, dtype: DtypePolicy = None, keep_fp32: Sequence[str] = ()) -> None:
        inner = unwrap(model)
        for live in live_tensors(inner)[0]:
            check_sendable(live.name, live.tensor, buffer=live.buffer)
            if isinstance(placement_of(live.name, live.tensor), Partition | Redistributed):
                raise UnsupportedCombination(
                    f"ModuleSource and the sharded parameter {live.name}: use source_for(model)", [live.name]
                )
        super().__init__(
            inner, lambda: _export_all(inner), dtype=dtype, keep_fp32=keep_fp32, trace=lambda: tensor_trace(inner)
        )


class _ShardedSource(CheckpointSource):
    """What the sources of sharded weights have in common; see `FSDPSource` and `ZeroSource`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: DtypePolicy = None,
        keep_fp32: Sequence[str] = (),
        direct_bytes: int = 1 << 20,
        wire_bytes: int = 1 << 28,
    ) -> None:
        inner = unwrap(model)

        def trace() -> object:
            reshard(inner)
            return tensor_trace(inner)

        super().__init__(
            inner,
            lambda: _export_all(inner),
            dtype=dtype,
            keep_fp32=keep_fp32,
            trace=trace,
            direct_bytes=direct_bytes,
            wire_bytes=wire_bytes,
        )


class FSDPSource(_ShardedSource):
    """Weights of a module under `fully_shard` (FSDP2), HSDP and CPUOffloadPolicy included.

    Local shards are cast to the engine dtype, then one all-gather per bucket makes them whole; large tensors by-pass
    the wire buffer. Collective over the shard group of the mesh.

    Args:
        model: The module that `fully_shard` was applied to, or a wrapper of it.
        dtype: Engine dtype, see `CheckpointSource`.
        keep_fp32: Names never cast.
        direct_bytes: Tensors of this size or more by-pass the wire buffer.
        wire_bytes: Largest wire buffer.
    """


class ZeroSource(_ShardedSource):
    """Weights of a DeepSpeed engine. Stages 1 and 2 need no communication; stage 3 gathers flat shards by bucket.

    Buckets are sized by `ds_numel`. The shards are read and never DeepSpeed's gathered state, so nothing stays
    gathered afterwards. Collective over the engine's data-parallel group under stage 3.

    Args:
        model: `DeepSpeedEngine`, or a module built under `deepspeed.zero.Init`.
        dtype: Engine dtype, see `CheckpointSource`.
        keep_fp32: Names never cast.
        direct_bytes: Tensors of this size or more by-pass the wire buffer.
        wire_bytes: Largest wire buffer.
    """
