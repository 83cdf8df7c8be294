"""Fingerprints that depend on every bit and on its place.

A norm or a plain sum misses permuted rows and swapped tensors. Here the bytes are read as 4-byte words; the word at
place i of a chunk is multiplied by an odd weight below 2**31 that belongs to i alone, the sum of chunk c by an odd
number to the power c, and all of it is added modulo 2**64. One flipped bit changes the result for certain (a power of
two times an odd number is not 0 modulo 2**64), and so do two exchanged words of one chunk (their difference times the
difference of their weights is below 2**63); other changes but for a chance of about 2**-30.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

CHUNK_WORDS = 1 << 20  # weights repeat per chunk
HORNER = 6364136223846793005  # odd
MASK = (1 << 30) - 1
MULTIPLIERS = (0x9E3779B1, 0x85EBCA77)  # odd: each step of the mixing is one to one on 30 bits


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    """Weights of the places of a chunk, int64 `[CHUNK_WORDS]`, all different and odd."""
    mixed = torch.arange(CHUNK_WORDS, dtype=torch.int64, device=device)
    for multiplier in MULTIPLIERS:
        mixed = (mixed * multiplier) & MASK
        mixed = mixed ^ (mixed >> 15)
    return mixed * 2 + 1


def chunk_powers(count: int) -> list[int]:
    """`HORNER**c` modulo 2**64 as signed 64-bit numbers, for c below `count`."""
    found, power = [], 1
    for _ in range(count):
        found.append(power - (1 << 64) if power >= 1 << 63 else power)
        power = power * HORNER % (1 << 64)
    return found


def _words(tensor: Tensor) -> Tensor:
    """The bytes of `tensor` in logical order as int32 `[ceil(bytes / 4)]`, padded with zero."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    rest = flat.numel() % 4
    if rest or flat.storage_offset() % 4:
        flat = torch.cat([flat, flat.new_zeros((4 - rest) % 4)])
    return flat.view(torch.int32)


@torch.no_grad()
def fingerprint_tensor(tensor: Tensor) -> Tensor:
    """Fingerprint of the bytes of `tensor` in logical order, an int64 scalar on its device (no synchronisation)."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = _weights(tensor.device)
    chunks = torch.split(_words(tensor), CHUNK_WORDS)
    for chunk, power in zip(chunks, chunk_powers(len(chunks)), strict=True):
        total = total + (chunk.to(torch.int64) * weights[: chunk.numel()]).sum() * power
    return total


@torch.no_grad()
def fingerprint_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Fingerprints of `tensors` cast to `dtype`, int64 `[n]`, in a handful of operations for all of them.

    Args:
        tensors: Of one device and dtype, each of at most `CHUNK_WORDS` words, a whole number of them.
        dtype: In which their bytes are read.
    """
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype)
    words = flat.view(torch.uint8).view(torch.int32)
    counts = torch.tensor([tensor.numel() * dtype.itemsize // 4 for tensor in tensors])
    first = torch.cumsum(counts, 0) - counts
    owner = torch.repeat_interleave(torch.arange(len(tensors)), counts)
    place = torch.arange(words.numel()) - first[owner]
    products = words * _weights(words.device)[place.to(words.device)]
    total = torch.zeros(len(tensors), dtype=torch.int64, device=words.device)
    return total.index_add_(0, owner.to(words.device), products)


def fingerprint(tensor: Tensor) -> int:
    """Fingerprint of the bytes of `tensor` in logical order, any dtype and layout."""
    return int(fingerprint_tensor(tensor))
