"""The kernel behind `Scanner` on a CUDA device: all tensors of one kind in one launch.

Each program reads a tile of 4-byte words of one tensor, sums the words times the weights of their places (the
definition is in `fingerprint`), and counts the elements whose exponent is all ones. Values that are cast on the way
to the engine are cast in registers, so that no copy of them is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft_sync.fingerprint import CHUNK_WORDS, MASK, MULTIPLIERS, chunk_powers
from rft_sync.scan import Piece

_TILE_WORDS = 1 << 14  # divides CHUNK_WORDS
_BLOCK_WORDS = 1 << 11
_CHUNK = tl.constexpr(CHUNK_WORDS)
_MASK = tl.constexpr(MASK)
_FIRST = tl.constexpr(MULTIPLIERS[0])
_SECOND = tl.constexpr(MULTIPLIERS[1])

_EXPONENTS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
_HALVES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Table:
    """Where the words of the tensors are, and which tile belongs to which tensor; int64 on the device."""

    addresses: Tensor
    words: Tensor
    tile_tensor: Tensor
    tile_start: Tensor
    """First word of the tile in its tensor."""
    powers: Tensor
    source: torch.dtype
    sent: torch.dtype


def takes(piece: Piece) -> bool:
    """Whether the kernel reads `piece`: dense, on 16-byte boundaries, uncast or cast from fp32 to a half precision."""
    tensor = piece.tensor
    uncast = tensor.dtype == piece.dtype
    narrowed = tensor.dtype == torch.float32 and piece.dtype in _HALVES
    aligned = tensor.data_ptr() % 16 == 0 and tensor.numel() * piece.dtype.itemsize % 16 == 0
    countable = piece.dtype in _EXPONENTS or not (piece.dtype.is_floating_point or piece.dtype.is_complex)
    dense = tensor.is_cuda and tensor.is_contiguous() and tensor.numel() > 0
    return dense and aligned and countable and (uncast or narrowed)


def build_table(pieces: Sequence[Piece]) -> Table:
    """The table of pieces of one device, dtype and sent dtype."""
    device = pieces[0].tensor.device
    words = torch.tensor([piece.tensor.numel() * piece.dtype.itemsize // 4 for piece in pieces])
    tiles = -(-words // _TILE_WORDS)
    owner = torch.repeat_interleave(torch.arange(len(pieces)), tiles)
    first = torch.cumsum(tiles, 0) - tiles
    start = (torch.arange(int(tiles.sum())) - first[owner]) * _TILE_WORDS
    return Table(
        addresses=torch.tensor([piece.tensor.data_ptr() for piece in pieces]).to(device),
        words=words.to(device),
        tile_tensor=owner.to(device),
        tile_start=start.to(device),
        powers=torch.tensor(chunk_powers(-(-int(words.max()) // CHUNK_WORDS))).to(device),
        source=pieces[0].tensor.dtype,
        sent=pieces[0].dtype,
    )


def run(table: Table, *, finite: bool) -> tuple[Tensor, Tensor | None]:
    """Fingerprints `[n]` and, with `finite`, numbers of NaN and Inf `[n]`, int64 on the device."""
    exponent = _EXPONENTS.get(table.sent, 0) if finite else 0
    tiles = table.tile_tensor.numel()
    sums = torch.empty(tiles, dtype=torch.int64, device=table.addresses.device)
    bad = torch.empty_like(sums)
    _scan_kernel[(tiles,)](
        table.addresses,
        table.words,
        table.tile_tensor,
        table.tile_start,
        table.powers,
        sums,
        bad,
        HALF=_HALVES.get(table.sent, tl.int32) if table.source != table.sent else tl.int32,
        CAST=table.source != table.sent,
        EXPONENT=exponent,
        PAIRS=table.sent.itemsize == 2,
        TILE=_TILE_WORDS,
        BLOCK=_BLOCK_WORDS,
        num_warps=8,
    )
    total = torch.zeros(table.words.numel(), dtype=torch.int64, device=sums.device)
    total.index_add_(0, table.tile_tensor, sums)
    if not exponent:
        return total, None
    counted = torch.zeros_like(total).index_add_(0, table.tile_tensor, bad)
    return total, counted


@triton.jit  # type: ignore[untyped-decorator]
def _scan_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    addresses,  # noqa: ANN001
    words,  # noqa: ANN001
    tile_tensor,  # noqa: ANN001
    tile_start,  # noqa: ANN001
    powers,  # noqa: ANN001
    sums,  # noqa: ANN001
    bad,  # noqa: ANN001
    HALF: tl.constexpr,  # noqa: N803
    CAST: tl.constexpr,  # noqa: N803
    EXPONENT: tl.constexpr,  # noqa: N803
    PAIRS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    tile = tl.program_id(0)
    tensor = tl.load(tile_tensor + tile)
    start = tl.load(tile_start + tile)
    end = tl.multiple_of(tl.load(words + tensor), 4)
    start = tl.multiple_of(start, 16)
    address = tl.load(addresses + tensor)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    wrong = tl.zeros([BLOCK], dtype=tl.int32)
    within = (start % _CHUNK).to(tl.int32)
    for step in tl.static_range(0, TILE, BLOCK):
        place = start + step + lanes
        inside = place < end
        if CAST:
            values = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
            both = 2 * (start + step) + tl.arange(0, 2 * BLOCK)
            pairs = tl.load(values + both, mask=both < 2 * end, other=0.0).to(HALF).to(tl.int16, bitcast=True)
            low, high = tl.split(tl.reshape(pairs, [BLOCK, 2]))
            word = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
        else:
            whole = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
            word = tl.load(whole + place, mask=inside, other=0)
        mixed = (within + step + lanes).to(tl.uint32)
        mixed = (mixed * _FIRST) & _MASK
        mixed = mixed ^ (mixed >> 15)
        mixed = (mixed * _SECOND) & _MASK
        mixed = mixed ^ (mixed >> 15)
        weight = (mixed * 2 + 1).to(tl.int32)
        total += word.to(tl.int64) * weight.to(tl.int64)
        if EXPONENT:
            if PAIRS:
                wrong += ((word & EXPONENT) == EXPONENT).to(tl.int32)
                wrong += (((word >> 16) & EXPONENT) == EXPONENT).to(tl.int32)
            else:
                wrong += ((word & EXPONENT) == EXPONENT).to(tl.int32)
    power = tl.load(powers + start // _CHUNK)
    tl.store(sums + tile, tl.sum(total, axis=0) * power)
    tl.store(bad + tile, tl.sum(wrong, axis=0).to(tl.int64))
