"""The coalesced all-gather of the shards of a bucket, through two buffers that are reused."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rft_sync.parameters import ALIGNMENT_BYTES
from rft_sync.partition import Partition, Placement, Redistributed, Whole


@dataclass(frozen=True, slots=True)
class GatherRequest:
    """One live tensor that is wanted whole, in `dtype`."""

    name: str
    placement: Placement
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Slot:
    """Place of one partitioned tensor: in the result buffer, and in each rank's segment of the wire buffer."""

    request: GatherRequest
    partition: Partition
    offset: int
    """In the result buffer, bytes."""
    nbytes: int
    """Of the whole tensor, without padding."""
    rank_bytes: int
    """Of one rank's shard, padded to the largest."""
    segment_bytes: int
    """`rank_bytes`, aligned."""
    direct: bool
    """Gathered straight into the result buffer."""


def _all_gather(output: Tensor, send: Tensor, group: dist.ProcessGroup) -> None:
    """Collective over `group`. torch 2.13 renamed the call."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, send, group=group)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class BucketGatherer:
    """Makes partitioned tensors whole, one collective for many small ones.

    Small shards are cast and packed into one wire buffer, gathered at once and unpacked into the result buffer; a
    tensor of `direct_bytes` or more is gathered straight into the result buffer, because packing it would cost more
    than the collective that is saved. Both buffers stay for the next bucket until `release`.

    Attributes:
        peak_bytes: Most extra bytes held at once (buffers and casts).
        cast_seconds: Time in reading, casting and packing this rank's shards.
        casts: (from, to) dtype -> number of tensors.
    """

    def __init__(self, *, direct_bytes: int = 1 << 20, wire_bytes: int = 1 << 28) -> None:
        self.direct_bytes = direct_bytes
        self.wire_bytes = wire_bytes
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}
        self._error: Exception | None = None
        self.peak_bytes = 0
        self.cast_seconds = 0.0
        self.casts: dict[tuple[torch.dtype, torch.dtype], int] = {}

    def release(self) -> None:
        """Give the buffers back."""
        self._buffers.clear()

    def reset_counters(self) -> None:
        """Start new counts of bytes, seconds and casts."""
        self.peak_bytes, self.cast_seconds, self.casts = 0, 0.0, {}

    def _buffer(self, role: str, device: torch.device, nbytes: int) -> Tensor:
        buffer = self._buffers.get((role, device))
        if buffer is None or buffer.numel() < nbytes:
            self._buffers.pop((role, device), None)  # the old one goes before the new one comes
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._buffers[role, device] = buffer
        return buffer

    @torch.no_grad()
    def gather(self, requests: Sequence[GatherRequest]) -> list[Tensor]:
        """Whole tensors for `requests`, in order; views of the buffers, good until the next call.

        Collective over the group of each partitioned tensor: every rank gives the same list. An error while reading
        a local shard is raised after the collectives, so that no other rank waits for this one.
        """
        self._error = None
        slots, sizes = self._slots(requests)
        results = {device: self._buffer("result", device, nbytes) for device, nbytes in sizes.items()}
        self._gather_slots(slots, results)
        whole = self._whole(requests)
        held = sum(buffer.numel() for buffer in self._buffers.values())
        self.peak_bytes = max(self.peak_bytes, held + whole[1])
        if self._error is not None:
            raise self._error
        views = iter([self._view(slot, results[slot.partition.device]) for slot in slots])
        return [
            next(views) if isinstance(request.placement, Partition) else whole[0][i]
            for i, request in enumerate(requests)
        ]

    def _slots(self, requests: Sequence[GatherRequest]) -> tuple[list[_Slot], dict[torch.device, int]]:
        slots: list[_Slot] = []
        sizes: dict[torch.device, int] = {}
        for request in requests:
            partition = request.placement
            self._count_cast(request)
            if not isinstance(partition, Partition):
                continue
            offset = sizes.get(partition.device, 0)
            itemsize = request.dtype.itemsize
            nbytes, rank_bytes = math.prod(partition.shape) * itemsize, partition.numel_per_rank * itemsize
            direct = nbytes >= self.direct_bytes
            slots.append(_Slot(request, partition, offset, nbytes, rank_bytes, _aligned(rank_bytes), direct))
            sizes[partition.device] = offset + _aligned(rank_bytes * partition.group.size() if direct else nbytes)
        return slots, sizes

    def _count_cast(self, request: GatherRequest) -> None:
        if request.placement.dtype != request.dtype:
            key = (request.placement.dtype, request.dtype)
            self.casts[key] = self.casts.get(key, 0) + 1

    def _gather_slots(self, slots: Sequence[_Slot], results: Mapping[torch.device, Tensor]) -> None:
        """Large tensors one by one, runs of small ones together while the wire buffer (padding included) has room.

        Collective over the groups of `slots`; the runs follow from global shapes, alike on every rank.
        """
        pending: list[_Slot] = []
        segment = 0
        for slot in slots:
            if slot.direct:
                self._gather_direct(slot, results[slot.partition.device])
                continue
            group, device = slot.partition.group, slot.partition.device
            if pending and (
                group is not pending[0].partition.group
                or device != pending[0].partition.device
                or (segment + slot.segment_bytes) * group.size() > self.wire_bytes
            ):
                self._gather_packed(pending, segment, results[pending[0].partition.device])
                pending, segment = [], 0
            pending.append(slot)
            segment += slot.segment_bytes
        if segment:
            self._gather_packed(pending, segment, results[pending[0].partition.device])

    def _place_shard(self, slot: _Slot, target: Tensor) -> None:
        """Cast this rank's shard into `target` (uint8)."""
        begin = time.perf_counter()
        try:
            shard = slot.partition.local()
            target[: shard.numel() * slot.request.dtype.itemsize].view(slot.request.dtype).copy_(shard)
        except Exception as error:  # noqa: BLE001 -- kept until the other ranks have been served
            self._error = self._error or error
        self.cast_seconds += time.perf_counter() - begin

    def _gather_direct(self, slot: _Slot, result: Tensor) -> None:
        """Collective over the slot's group."""
        group = slot.partition.group
        size = slot.rank_bytes
        output = result[slot.offset : slot.offset + size * group.size()]
        shard = None
        try:
            shard = slot.partition.local()
        except Exception as error:  # noqa: BLE001 -- kept until the other ranks have been served
            self._error = self._error or error
        ready = (
            shard is not None
            and shard.dtype == slot.request.dtype
            and shard.device == output.device
            and shard.numel() * shard.element_size() == size
            and shard.is_contiguous()
        )
        if ready and shard is not None:
            send = shard.view(torch.uint8)
        else:  # in place: this rank's part of the output is its input
            send = output[group.rank() * size : (group.rank() + 1) * size]
            self._place_shard(slot, send)
        _all_gather(output, send, group)

    def _gather_packed(self, slots: Sequence[_Slot], segment: int, result: Tensor) -> None:
        """One gather for `slots`, of `segment` bytes a rank. Collective over their group."""
        group = slots[0].partition.group
        wire = self._buffer("wire", slots[0].partition.device, segment * group.size())[: segment * group.size()]
        own = wire[group.rank() * segment : (group.rank() + 1) * segment]
        offset = 0
        for slot in slots:
            self._place_shard(slot, own[offset : offset + slot.rank_bytes])
            offset += slot.segment_bytes
        _all_gather(wire, own, group)
        by_rank = wire.view(group.size(), segment)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        offset = 0
        for slot in slots:
            pairs = _unpacking(slot, by_rank[:, offset : offset + slot.rank_bytes], result)
            targets += [target for target, _ in pairs]
            sources += [source for _, source in pairs]
            offset += slot.segment_bytes
        torch._foreach_copy_(targets, sources)

    def _view(self, slot: _Slot, result: Tensor) -> Tensor:
        flat = result[slot.offset : slot.offset + slot.nbytes]
        return flat.view(slot.request.dtype).view(slot.partition.shape)

    def _whole(self, requests: Sequence[GatherRequest]) -> tuple[dict[int, Tensor], int]:
        """Tensors that need no buffer. Collective over the mesh of each redistributed one."""
        found: dict[int, Tensor] = {}
        extra = 0
        for index, request in enumerate(requests):
            placement = request.placement
            if isinstance(placement, Whole):
                found[index] = placement.read().to(request.dtype)
                extra += found[index].nbytes if placement.dtype != request.dtype else 0
            elif isinstance(placement, Redistributed):
                found[index] = placement.tensor.to(request.dtype).full_tensor()  # type: ignore[attr-defined]
                extra += found[index].nbytes
        return found, extra


def _unpacking(slot: _Slot, by_rank: Tensor, result: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(target, source) copies that put the ranks' pieces of one tensor (`[world, rank_bytes]`) side by side."""
    if slot.nbytes == 0:
        return []
    target = result[slot.offset : slot.offset + slot.nbytes]
    full, rest = divmod(slot.nbytes, slot.rank_bytes)
    pairs = []
    if full:
        pairs.append((target[: full * slot.rank_bytes].view(full, slot.rank_bytes), by_rank[:full]))
    if rest:
        pairs.append((target[full * slot.rank_bytes :], by_rank[full, :rest]))
    return pairs
