"""Sharing prompts inside a group, and giving every rank its own outputs back."""

import io
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rft_dist.agreement import packed_error, raise_from, raise_together
from rft_dist.errors import GatherError, GroupError
from rft_dist.exchange import gather_bytes, gather_flat, gather_rows, group_device, group_rank, group_size

T = TypeVar("T")

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class GatherPlan:
    """Whose items a gathered list holds: data only.

    Counts (3, 1) and index 1 describe a list of four items of which the last is this rank's.

    Attributes:
        counts: number of items from each rank of the group, by position.
        index: this rank's position in the group.
    """

    counts: tuple[int, ...]
    index: int

    def __post_init__(self) -> None:
        if any(count < 0 for count in self.counts):
            raise GatherError(f"counts={self.counts} holds a negative number: give the number of items of each rank")
        if not 0 <= self.index < len(self.counts):
            raise GatherError(f"index={self.index} is no position among {len(self.counts)} ranks")

    @property
    def total(self) -> int:
        """Items of all ranks together."""
        return sum(self.counts)

    @property
    def count(self) -> int:
        """Items of this rank."""
        return self.counts[self.index]

    @property
    def offset(self) -> int:
        """Items of the ranks before this one."""
        return sum(self.counts[: self.index])

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each rank's items start."""
        return (0, *accumulate(self.counts))[:-1]


class _HostPickler(pickle.Pickler):
    """Pickles tensors of a device as CPU tensors: the receiver must not touch the sender's device."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            host: Any = obj.detach().cpu()
            return host.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def gather_inputs(items: Iterable[T], group: dist.ProcessGroup | None) -> tuple[list[T], GatherPlan]:
    """Every rank's items in the order of the ranks, and the plan to find one's own again. Collective over the group.

    Each item travels once, however many samples will be drawn from it, as a pickled object: dicts, images and text
    alike. Ranks may bring different numbers of items, none too, and different kinds of items: whatever is decided from
    the returned list (say whether images are there) is decided alike on every rank. Tensors on a device arrive on the
    CPU.

    Args:
        items: this rank's items.
        group: the gloo group of the ranks that share (`RolloutGroups.tp_cpu`); None means the default group, or
            this process alone without one.

    Returns:
        The items of all ranks, and the plan for `slice_local`.

    Raises:
        GroupError: the group cannot carry CPU data, or this rank is no member.
        Exception: what one rank raised while packing or unpacking its items, on every rank.
    """
    position = group_rank(group)
    if group_device(group).type != "cpu":
        raise GroupError("gather_inputs got a group for device tensors only (nccl): pass its gloo twin, groups.tp_cpu")
    error: Exception | None = None
    try:
        own = list(items)
        count, payload = len(own), _packed(own)
    except Exception as failure:  # noqa: BLE001 - raised on all ranks below
        error, count, payload = failure, 0, packed_error(failure)
    pieces = gather_bytes(payload, [count, int(error is not None)], group)
    for first, ((_, failed), piece) in enumerate(pieces):
        if failed:
            raise_from(first, piece, error, group)
    gathered: list[T] = []
    try:
        for _, piece in pieces:
            gathered.extend(pickle.loads(piece))
    except Exception as failure:  # noqa: BLE001 - raised on all ranks below
        error = failure
    raise_together(error, group)
    return gathered, GatherPlan(tuple(row[0] for row, _ in pieces), position)


def slice_local(outputs: Sequence[T], plan: GatherPlan, samples_per_input: int = 1) -> list[T]:
    """This rank's outputs out of those for the whole gathered list.

    With two samples for the prompts A, B the outputs come as A0 A1 B0 B1.

    Args:
        outputs: samples_per_input outputs for each gathered item, in order.
        plan: what `gather_inputs` returned.
        samples_per_input: outputs for each item.

    Raises:
        GatherError: (a ValueError) the number of outputs is not plan.total * samples_per_input.
    """
    if type(samples_per_input) is not int or samples_per_input < 1:
        raise GatherError(f"samples_per_input={samples_per_input!r} is no count: give a whole number from 1 up")
    wanted = plan.total * samples_per_input
    if len(outputs) != wanted:
        raise GatherError(
            f"{len(outputs)} outputs for {plan.total} gathered items with {samples_per_input} samples each: "
            f"{wanted} were expected; pass the engine's whole output, in order, and the samples_per_input asked for"
        )
    start = plan.offset * samples_per_input
    return list(outputs[start : start + plan.count * samples_per_input])


def _packed(items: list[Any]) -> bytes:
    stream = io.BytesIO()
    _HostPickler(stream, pickle.HIGHEST_PROTOCOL).dump(items)
    return stream.getvalue()


def all_gather_ragged(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """Every rank's tensor, where the first dimension may differ. Collective over the group.

    Args:
        tensor: [L, ...]; L may be 0 and differ by rank, dtype and further dimensions are the same on all ranks.
        group: None means the default group, or this process alone without one.

    Returns:
        One tensor for each rank, by position, without gradient, on the device of `tensor`.

    Raises:
        GatherError: (a ValueError) dtypes or further dimensions differ, or the tensor cannot travel; on every rank.
    """
    if group_size(group) == 1:
        return [tensor.detach()]
    rows = gather_rows(_shape_row(tensor), group)
    _check_rows(rows)
    device = group_device(group)
    flat = tensor.detach().to(device).contiguous().reshape(-1)
    counts = [_row_bytes(row, tensor.element_size()) for row in rows]
    pieces = gather_flat(flat.view(torch.uint8), counts, group)
    return [
        piece.clone().view(tensor.dtype).reshape(_row_shape(row)).to(tensor.device)
        for piece, row in zip(pieces, rows, strict=True)
    ]


def _shape_row(tensor: torch.Tensor) -> list[int]:
    """Dtype number (-1: cannot travel), number of dimensions, then the shape padded to a fixed width."""
    fits = tensor.dtype in _DTYPES and 1 <= tensor.dim() <= _MAX_DIMENSIONS and tensor.layout is torch.strided
    dtype = _DTYPES.index(tensor.dtype) if fits else -1
    shape = list(tensor.shape)[:_MAX_DIMENSIONS]
    return [dtype, tensor.dim(), *shape, *[0] * (_MAX_DIMENSIONS - len(shape))]


def _row_shape(row: list[int]) -> tuple[int, ...]:
    return tuple(row[2 : 2 + row[1]])


def _row_bytes(row: list[int], element_size: int) -> int:
    count = element_size
    for extent in _row_shape(row):
        count *= extent
    return count


def _check_rows(rows: list[list[int]]) -> None:
    """Refuses what does not fit together; all ranks hold the same rows, so all of them raise the same error."""
    for position, row in enumerate(rows):
        if row[0] < 0:
            raise GatherError(
                f"the tensor of position {position} (shape {_row_shape(row)}) cannot travel: give a dense tensor of "
                f"1 to {_MAX_DIMENSIONS} dimensions and a common dtype; reshape a scalar to [1]"
            )
        if row[0] != rows[0][0] or row[1] != rows[0][1] or _row_shape(row)[1:] != _row_shape(rows[0])[1:]:
            raise GatherError(
                f"position {position} has {_DTYPES[row[0]]} {_row_shape(row)}, position 0 has "
                f"{_DTYPES[rows[0][0]]} {_row_shape(rows[0])}: only the first dimension may differ"
            )
