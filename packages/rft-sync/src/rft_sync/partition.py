"""How a parameter is spread over ranks: FSDP2 rows and ZeRO-3 flat shards in one form. No communication."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rft_sync.errors import EngineNotReady, UnsupportedCombination


@dataclass(frozen=True, slots=True)
class Partition:
    """A tensor whose flat elements lie in rank order over `group`, `numel_per_rank` each (the last may hold fewer)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    numel_per_rank: int
    group: dist.ProcessGroup
    device: torch.device
    """Where the gathered tensor is made."""
    local: Callable[[], Tensor]
    """Reads this rank's elements, flat, at most `numel_per_rank` of them."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that this rank can read without communication."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Redistributed:
    """A DTensor with other placements: read by DTensor's own `full_tensor`, one collective per tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor


Placement = Partition | Whole | Redistributed


def _gather_device(group: dist.ProcessGroup, local: torch.device) -> torch.device:
    """CPU-offloaded shards of an NCCL group are gathered on the card."""
    if local.type == "cpu" and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return local


def _zero_placement(name: str, parameter: Tensor) -> Placement:
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        raise EngineNotReady(f"ZeRO-3 parameter {name} is not partitioned; finish deepspeed.initialize first", [name])
    if hasattr(shard, "ds_quant_scale"):
        raise UnsupportedCombination(
            f"ZeRO-3 quantised weights ({name}) and weight sync: switch the option off", [name]
        )
    # Persisted parameters have a current shard too, so every parameter takes the same path on every rank.
    if getattr(shard.status, "name", "AVAILABLE") != "AVAILABLE":
        raise UnsupportedCombination(
            f"ZeRO-3 parameter {name} offloaded to NVMe and weight sync: offload parameters to the CPU or not at all",
            [name],
        )
    group: dist.ProcessGroup = parameter.ds_process_group  # type: ignore[attr-defined]
    whole_shape = tuple(parameter.ds_shape)  # type: ignore[attr-defined]
    if group.size() == 1 and _gather_device(group, shard.device) == shard.device:
        numel = math.prod(whole_shape)
        return Whole(
            whole_shape,
            shard.dtype,
            lambda: parameter.ds_tensor.detach().view(-1)[:numel].view(whole_shape),  # type: ignore[attr-defined]
        )
    return Partition(
        shape=whole_shape,
        dtype=shard.dtype,
        numel_per_rank=int(shard.ds_numel),
        group=group,
        device=_gather_device(group, shard.device),
        local=lambda: parameter.ds_tensor.detach().view(-1),  # type: ignore[attr-defined]
    )


def _dtensor_placement(name: str, tensor: Tensor) -> Placement:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    assert isinstance(tensor, DTensor)
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    if mesh.get_coordinate() is None:
        raise UnsupportedCombination(
            f"{name} lives on a mesh without this rank ({mesh}) and a collective gather: call on the mesh's ranks only",
            [name],
        )
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedCombination(f"Partial DTensor {name} and weight sync: reduce it first", [name])
    sharded = [dim for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    if not sharded:
        return Whole(shape, tensor.dtype, lambda: tensor._local_tensor.detach())
    placement = tensor.placements[sharded[0]]
    if len(sharded) > 1 or type(placement) is not Shard or placement.dim != 0:
        return Redistributed(shape, tensor.dtype, tensor)
    group = mesh.get_group(sharded[0])
    if group.size() == 1 and _gather_device(group, tensor._local_tensor.device) == tensor._local_tensor.device:
        return Whole(shape, tensor.dtype, lambda: tensor._local_tensor.detach())
    rows = -(-shape[0] // group.size())  # torch.chunk: all ranks but the last non-empty one hold this many
    return Partition(
        shape=shape,
        dtype=tensor.dtype,
        numel_per_rank=rows * math.prod(shape[1:]),
        group=group,
        device=_gather_device(group, tensor._local_tensor.device),
        local=lambda: tensor._local_tensor.detach().reshape(-1),
    )


def placement_of(name: str, tensor: Tensor) -> Placement:
    """Where the elements of `tensor` are. Global shapes; no communication.

    Raises:
        UnsupportedCombination: A placement that cannot be read rightly.
        EngineNotReady: A ZeRO-3 parameter before DeepSpeed has partitioned it.
    """
    if hasattr(tensor, "ds_id"):
        return _zero_placement(name, tensor)
    if type(tensor).__name__ == "DTensor":
        return _dtensor_placement(name, tensor)
    return Whole(tuple(tensor.shape), tensor.dtype, tensor.detach)
