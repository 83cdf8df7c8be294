"""Many tensors read at once: fingerprints, and how many of their elements are NaN or Inf.

On a CUDA device one kernel reads them all (`scan_kernel`, where Triton is there: it comes with torch's CUDA builds);
elsewhere, and for tensors that the kernel does not take, torch's own operations do: the small ones together, the large
ones one by one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from rft_sync.fingerprint import fingerprint_tensor, fingerprint_together
from rft_sync.parameters import ParamMeta

SMALL = 1 << 14
"""Elements up to which tensors are read together: a call for each costs more than their bytes."""
BATCH = 64
"""Small tensors whose fingerprints are taken together."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor as it shall arrive: its values in `dtype`."""

    tensor: Tensor
    dtype: torch.dtype

    def cast(self) -> Tensor:
        """The values in `dtype`; no copy where they are so already."""
        return self.tensor.detach().to(self.dtype)


class LivePieces(Mapping[str, Piece]):
    """Pieces of live tensors by name, made when they are asked for.

    Args:
        metadata: What is sent.
        tensors: Name -> live tensor, aliases left out.
    """

    def __init__(self, metadata: Mapping[str, ParamMeta], tensors: Mapping[str, Tensor]) -> None:
        self._metadata = metadata
        self._tensors = tensors

    def __getitem__(self, name: str) -> Piece:
        meta = self._metadata[name]
        return Piece(self._tensors[meta.alias_of or name], meta.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata)

    def __len__(self) -> int:
        return len(self._metadata)


@dataclass(slots=True)
class Scanned:
    """Results on their devices, by place in the scanned sequence; reading them is the one synchronisation."""

    sums: list[tuple[Sequence[int], Tensor]] = field(default_factory=list)
    """Places, and their fingerprints `[n]` int64."""
    bad: list[tuple[Sequence[int], Tensor]] = field(default_factory=list)
    """Places, and numbers `[n]` int64 that are 0 where there is no NaN or Inf."""
    twins: Mapping[int, int] = field(default_factory=dict)
    """Place of a piece that is the same memory as an earlier one (tied weights) -> place of that one, which is read."""

    def known(self) -> set[int]:
        """Places whose fingerprints were taken."""
        found = {place for places, _ in self.sums for place in places}
        return found | {place for place, first in self.twins.items() if first in found}

    def fingerprints(self) -> dict[int, int]:
        """Place -> fingerprint."""
        return self._with_twins(_read(self.sums))

    def nonfinite(self) -> list[int]:
        """Places with NaN or Inf."""
        return sorted(place for place, count in self._with_twins(_read(self.bad)).items() if count)

    def _with_twins(self, values: dict[int, int]) -> dict[int, int]:
        return values | {place: values[first] for place, first in self.twins.items() if first in values}


def _read(results: Sequence[tuple[Sequence[int], Tensor]]) -> dict[int, int]:
    """Place -> number, with one transfer per device."""
    by_device: dict[torch.device, list[tuple[Sequence[int], Tensor]]] = {}
    for places, tensor in results:
        by_device.setdefault(tensor.device, []).append((places, tensor))
    values: dict[int, int] = {}
    for found in by_device.values():
        numbers = torch.cat([tensor for _, tensor in found]).tolist()
        values.update(zip((place for places, _ in found for place in places), numbers, strict=True))
    return values


@dataclass(frozen=True, slots=True)
class _Layout:
    """What was worked out about a sequence of pieces; it holds none of their tensors."""

    twins: Mapping[int, int]
    fused: Sequence[tuple[Sequence[int], object]]
    """Places that one launch of the kernel reads, and its table."""
    rest: Sequence[int]
    """Places that torch's operations read."""


class Scanner:
    """Reads pieces and keeps what it worked out about the sequences it has read last.

    A sequence that was there before (same addresses, sizes and dtypes) needs one launch of the kernel, and no host work
    per tensor where the caller says so by a token. All pieces of a rotating sample are kept.
    """

    def __init__(self, *, kept: int = 256) -> None:
        self._kept = kept
        self._layouts: dict[object, _Layout] = {}
        self._known: tuple[object, _Layout] | None = None

    @torch.no_grad()
    def scan(
        self,
        pieces: Sequence[Piece] | Mapping[str, Piece],
        *,
        finite: bool = False,
        fingerprints: bool = True,
        token: object = None,
    ) -> Scanned:
        """Fingerprints of `pieces`, and with `finite` the number of NaN and Inf in each.

        No synchronisation on a card. Without `fingerprints` they are taken only where they come for nothing.

        Args:
            pieces: What is read; a mapping is read in its order.
            finite: Count.
            fingerprints: Take fingerprints.
            token: What is equal to the token of the last scan that had one only if its pieces lay at the same addresses
                and were read in the same dtypes.
        """
        listed: Sequence[Piece] | None = None
        if self._known is not None and token is not None and self._known[0] == token:
            layout = self._known[1]
        else:
            listed = list(pieces.values()) if isinstance(pieces, Mapping) else pieces
            layout = self._layout(listed)
            if token is not None:
                self._known = token, layout
        scanned = Scanned(twins=layout.twins)
        for places, table in layout.fused:
            sums, bad = _kernel_module().run(table, finite=finite)  # type: ignore[union-attr]
            scanned.sums.append((places, sums))
            if bad is not None:
                scanned.bad.append((places, bad))
        if layout.rest:
            if listed is None:
                listed = list(pieces.values()) if isinstance(pieces, Mapping) else pieces
            self._scan_rest([(place, listed[place]) for place in layout.rest], finite, fingerprints, scanned)
        return scanned

    def _scan_rest(
        self, pieces: Sequence[tuple[int, Piece]], finite: bool, fingerprints: bool, scanned: Scanned
    ) -> None:
        if finite:
            scanned.bad += screened(pieces)
        if fingerprints:
            scanned.sums += fingerprinted(pieces)

    def _layout(self, pieces: Sequence[Piece]) -> _Layout:
        keys = [_place_of(piece) for piece in pieces]
        key = tuple(keys)
        layout = self._layouts.pop(key, None)
        if layout is None:
            layout = _laid_out(pieces, keys)
        self._layouts[key] = layout  # the newest last
        while len(self._layouts) > self._kept:
            del self._layouts[next(iter(self._layouts))]
        return layout


def _place_of(piece: Piece) -> tuple[object, ...]:
    tensor = piece.tensor
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, piece.dtype


def _laid_out(pieces: Sequence[Piece], keys: Sequence[object]) -> _Layout:
    unique, twins = _unique_places(pieces, keys)
    kernel = _kernel_module() if any(piece.tensor.is_cuda for piece in pieces) else None
    chosen = [place for place in unique if kernel.takes(pieces[place])] if kernel is not None else []
    groups: dict[object, list[int]] = {}
    for place in chosen:
        piece = pieces[place]
        groups.setdefault((piece.tensor.device, piece.tensor.dtype, piece.dtype), []).append(place)
    fused = [(places, kernel.build_table([pieces[p] for p in places])) for places in groups.values()]  # type: ignore[union-attr]
    taken = set(chosen)
    return _Layout(twins, fused, [place for place in unique if place not in taken])


def _unique_places(pieces: Sequence[Piece], keys: Sequence[object]) -> tuple[list[int], dict[int, int]]:
    """Places of pieces that are memory of their own, and of the others with the place of their twin."""
    first: dict[object, int] = {}
    unique: list[int] = []
    twins: dict[int, int] = {}
    for place, (piece, key) in enumerate(zip(pieces, keys, strict=True)):
        found = first.setdefault(key, place) if piece.tensor.numel() else place
        if found == place:
            unique.append(place)
        else:
            twins[place] = found
    return unique, twins


def _kernel_module() -> ModuleType | None:
    try:
        from rft_sync import scan_kernel
    except ImportError:  # a torch build without Triton
        return None
    return scan_kernel


def screened(pieces: Sequence[tuple[int, Piece]]) -> list[tuple[Sequence[int], Tensor]]:
    """Places, and 1 where a value is NaN or Inf in the dtype in which it is sent, else 0.

    Only the extremes are cast: rounding keeps the order of numbers, so that some value becomes Inf if one of them does.
    Each byte is read once, and no copy is made.
    """
    found: list[tuple[Sequence[int], Tensor]] = []
    for places, tensors, sent in _of_a_kind(pieces):
        if not sent.is_floating_point:
            continue
        whole = [tensor if _has_extremes(tensor.dtype) else tensor.to(sent).to(torch.float32) for tensor in tensors]
        small = [index for index, tensor in enumerate(whole) if 0 < tensor.numel() <= SMALL]
        large = [index for index, tensor in enumerate(whole) if tensor.numel() > SMALL]
        extremes = [torch.aminmax(whole[index]) for index in large]
        if small:
            largest = torch._foreach_norm([whole[index] for index in small], float("inf"))
            found.append(([places[index] for index in small], _not_finite(torch.stack(tuple(largest)), sent)))
        if extremes:
            low, high = (torch.stack([pair[side] for pair in extremes]) for side in (0, 1))
            bad = torch.maximum(_not_finite(low, sent), _not_finite(high, sent))
            found.append(([places[index] for index in large], bad))
    return found


def _has_extremes(dtype: torch.dtype) -> bool:
    """Torch finds neither the extremes of 8-bit floating-point numbers, nor what integers become when they are cast."""
    return dtype.is_floating_point and dtype.itemsize >= 2


def _not_finite(values: Tensor, sent: torch.dtype) -> Tensor:
    return (~torch.isfinite(values.to(sent).to(torch.float32 if sent.itemsize < 2 else sent))).to(torch.int64)


def fingerprinted(pieces: Sequence[tuple[int, Piece]]) -> list[tuple[Sequence[int], Tensor]]:
    """Places and their fingerprints `[n]` int64."""
    found: list[tuple[Sequence[int], Tensor]] = []
    for places, tensors, sent in _of_a_kind(pieces):
        batch: list[int] = []
        for index, tensor in enumerate(tensors):
            if tensor.numel() <= SMALL and tensor.numel() * sent.itemsize % 4 == 0:
                batch.append(index)
            else:
                found.append(([places[index]], fingerprint_tensor(tensor.to(sent)).view(1)))
        for start in range(0, len(batch), BATCH):
            chosen = batch[start : start + BATCH]
            sums = fingerprint_together([tensors[index] for index in chosen], sent)
            found.append(([places[index] for index in chosen], sums))
    return found


def _of_a_kind(pieces: Sequence[tuple[int, Piece]]) -> Iterator[tuple[list[int], list[Tensor], torch.dtype]]:
    """Pieces with elements by device and dtypes: places, tensors, sent dtype; complex ones as pairs of real numbers."""
    kinds: dict[object, tuple[list[int], list[Tensor], torch.dtype]] = {}
    for place, piece in pieces:
        tensor, sent = piece.tensor.detach(), piece.dtype
        if sent.is_complex:
            tensor, sent = torch.view_as_real(tensor.to(sent).resolve_conj()), sent.to_real()
        places, tensors, _ = kinds.setdefault((tensor.device, tensor.dtype, sent), ([], [], sent))
        places.append(place)
        tensors.append(tensor)
    yield from kinds.values()
