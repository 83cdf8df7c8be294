"""Moving bytes between the ranks of a group: what the other modules are built on."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rft_dist.errors import GroupError

_LENGTH_BYTES = 8


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks in the group; without any process group this process is a world of one."""
    if group is None and not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This rank's position in the group.

    Raises:
        GroupError: this rank is no member, so it must not take part in the group's collectives.
    """
    if group is None and not dist.is_initialized():
        return 0
    position = dist.get_rank(group)
    if position < 0:
        raise GroupError(
            f"rank {dist.get_rank()} is no member of the group that was passed: pass a group which holds this rank"
        )
    return position


def group_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """World ranks of the group's members, by position."""
    if group is None and not dist.is_initialized():
        return [0]
    return dist.get_process_group_ranks(group)


def group_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's collectives take tensors: the current CUDA device for nccl, else the CPU."""
    if group is None and not dist.is_initialized():
        return torch.device("cpu")
    backend = dist.get_backend(group)
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gather_rows(row: Sequence[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    """Every rank's row of whole numbers, all of one length. Collective over the group."""
    size = group_size(group)
    if size == 1:
        return [list(row)]
    device = group_device(group)
    mine = torch.tensor(row, dtype=torch.int64, device=device)
    everyone = torch.empty(size, len(row), dtype=torch.int64, device=device)
    dist.all_gather(list(everyone), mine, group=group)
    return everyone.tolist()


def agree_maximum(row: Sequence[int], group: dist.ProcessGroup | None) -> list[int]:
    """The largest value of each column over the ranks. Collective over the group: one reduction."""
    if group_size(group) == 1:
        return list(row)
    largest = torch.tensor(row, dtype=torch.int64, device=group_device(group))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.tolist()


def gather_flat(flat: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Every rank's one-dimensional tensor, of lengths that all ranks know already. Collective over the group.

    One padded all-gather where the lengths are alike; one broadcast per non-empty rank where padding would more than
    double the bytes.

    Args:
        flat: this rank's tensor, on `group_device(group)`.
        counts: length of each rank's tensor, by position.
    """
    size, position = len(counts), group_rank(group)
    if size == 1:
        return [flat]
    longest, total = max(counts), sum(counts)
    if total == 0:
        return [flat.new_empty(0) for _ in counts]
    if size * longest <= 2 * total:
        padded = flat if len(flat) == longest else torch.cat([flat, flat.new_zeros(longest - len(flat))])
        everyone = list(flat.new_empty(size, longest))
        dist.all_gather(everyone, padded, group=group)
        return [part[:count] for part, count in zip(everyone, counts, strict=True)]
    parts = [flat if i == position else flat.new_empty(count) for i, count in enumerate(counts)]
    for part, origin in zip(parts, group_ranks(group), strict=True):
        if len(part):
            dist.broadcast(part, src=origin, group=group)
    return parts


def bytes_tensor(payload: bytes, device: torch.device) -> torch.Tensor:
    """The bytes as a one-dimensional uint8 tensor."""
    if not payload:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)


def tensor_bytes(tensor: torch.Tensor) -> bytearray:
    """The bytes of a one-dimensional uint8 tensor."""
    payload = bytearray(len(tensor))
    if payload:
        torch.frombuffer(payload, dtype=torch.uint8).copy_(tensor)
    return payload


def gather_bytes(
    payload: bytes, row: Sequence[int], group: dist.ProcessGroup | None
) -> list[tuple[list[int], bytearray]]:
    """Every rank's row of whole numbers and its payload. Collective over the group.

    Args:
        payload: any number of bytes, empty ones too.
        row: whole numbers that travel ahead; the same number of them on every rank.
    """
    rows = gather_rows([len(payload), *row], group)
    counts = [r[0] for r in rows]
    parts = gather_flat(bytes_tensor(payload, group_device(group)), counts, group)
    return [(r[1:], tensor_bytes(part)) for r, part in zip(rows, parts, strict=True)]


def gather_pages(payload: bytes, group: dist.ProcessGroup | None, page_bytes: int = 32768) -> list[bytearray]:
    """Every rank's payload in one collective where all fit a page, else in two. Collective over the group.

    A page starts with the payload's length in 8 bytes, so that nobody needs to know the lengths beforehand.
    """
    if group_size(group) == 1:
        return [bytearray(payload)]
    device = group_device(group)
    room = page_bytes - _LENGTH_BYTES
    page = len(payload).to_bytes(_LENGTH_BYTES, "little") + payload[:room].ljust(room, b"\0")
    flat = bytes_tensor(page, device)
    everyone = flat.new_empty(group_size(group), page_bytes)
    dist.all_gather(list(everyone), flat, group=group)
    pages = memoryview(tensor_bytes(everyone.view(-1)))
    pieces, rests = [], []
    for start in range(0, len(pages), page_bytes):
        length = int.from_bytes(pages[start : start + _LENGTH_BYTES], "little")
        body = pages[start + _LENGTH_BYTES : start + page_bytes]
        pieces.append(bytearray(body[:length]))
        rests.append(max(0, length - room))
    for piece, rest in zip(pieces, gather_flat(bytes_tensor(payload[room:], device), rests, group), strict=True):
        piece += tensor_bytes(rest)
    return pieces
