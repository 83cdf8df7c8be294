"""Small values between ranks, without NumPy: torch's own object collectives need it, and torch does not."""

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors for the collectives of `group` live."""
    on_card = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if on_card else torch.device("cpu")


def to_tensor(data: bytes, device: torch.device) -> Tensor:
    """`data` as uint8 `[len(data)]`."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def to_bytes(tensor: Tensor) -> bytes:
    """The bytes of a uint8 tensor."""
    local = tensor.cpu().contiguous()
    return ctypes.string_at(local.data_ptr(), local.numel()) if local.numel() else b""


def gather_values(value: object, group: dist.ProcessGroup | None) -> list[Any]:
    """`value` of every rank, in rank order; picklable. Collective over `group`."""
    device = wire_device(group)
    data = to_tensor(pickle.dumps(value), device)
    world_size = dist.get_world_size(group)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(world_size)]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(found) for found in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded, group=group)
    return [pickle.loads(to_bytes(found[: int(n)])) for found, n in zip(gathered, sizes, strict=True)]


def broadcast_text(text: str | None, src: int, group: dist.ProcessGroup | None) -> str:
    """The text that global rank `src` gives; the others give None. Collective over `group`."""
    device = wire_device(group)
    data = to_tensor((text or "").encode(), device)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    dist.broadcast(size, src, group=group)
    payload = data if text is not None else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(payload, src, group=group)
    return to_bytes(payload).decode()
