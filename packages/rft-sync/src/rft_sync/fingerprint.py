"""Fingerprints that depend on every bit and on its place.

A norm or a plain sum misses permuted rows and swapped tensors. Here each 4-byte word is multiplied by an odd weight
that depends on its position, and the products are added modulo 2**64: one flipped bit changes the sum for certain (a
power of two times an odd number is not 0 modulo 2**64), other changes but for a chance of about 2**-32 or less.
"""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

_CHUNK_WORDS = 1 << 20  # part of the definition: weights repeat per chunk, and the chunks are joined by Horner's rule
_MIX_A = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_B = -4658895280553007687  # 0xBF58476D1CE4E5B9 as int64
_HORNER = 6364136223846793005  # odd


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    mixed = (torch.arange(1, _CHUNK_WORDS + 1, dtype=torch.int64, device=device)) * _MIX_A
    mixed = (mixed ^ (mixed >> 31)) * _MIX_B
    return (mixed ^ (mixed >> 29)) | 1


def _words(tensor: Tensor) -> Tensor:
    """The bytes of `tensor` in logical order as int32 `[ceil(bytes / 4)]`, padded with zero."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    flat = flat.view(torch.uint8)
    rest = flat.numel() % 4
    if rest or flat.storage_offset() % 4:
        flat = torch.cat([flat, flat.new_zeros((4 - rest) % 4)])
    return flat.view(torch.int32)


@torch.no_grad()
def fingerprint_tensor(tensor: Tensor) -> Tensor:
    """Fingerprint of the bytes of `tensor` in logical order, an int64 scalar on its device (no synchronisation)."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = _weights(tensor.device)
    for chunk in torch.split(_words(tensor), _CHUNK_WORDS):
        total = total * _HORNER + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum()
    return total


def fingerprint(tensor: Tensor) -> int:
    """Fingerprint of the bytes of `tensor` in logical order, any dtype and layout."""
    return int(fingerprint_tensor(tensor))


def read_fingerprints(scalars: Iterable[Tensor]) -> list[int]:
    """Scalars of `fingerprint_tensor` as numbers, with one transfer per device."""
    values = list(scalars)
    found: dict[int, int] = {}
    for device in {value.device for value in values}:
        positions = [index for index, value in enumerate(values) if value.device == device]
        found.update(zip(positions, torch.stack([values[index] for index in positions]).tolist(), strict=True))
    return [found[index] for index in range(len(values))]
