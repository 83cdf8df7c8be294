"""Many tensors read at once: fingerprints, and how many of their elements are NaN or Inf.

On a CUDA device one kernel reads them all (`scan_kernel`, where Triton is there: it comes with torch's CUDA builds);
elsewhere, and for tensors that the kernel does not take, torch's own operations do, tensor by tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from rft_sync.fingerprint import fingerprint_tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor as it shall arrive: its values in `dtype`."""

    tensor: Tensor
    dtype: torch.dtype

    def cast(self) -> Tensor:
        """The values in `dtype`; no copy where they are so already."""
        return self.tensor.detach().to(self.dtype)


@dataclass(slots=True)
class Scanned:
    """Results on their devices, by place in the scanned sequence; reading them is the one synchronisation."""

    sums: list[tuple[Sequence[int], Tensor]] = field(default_factory=list)
    """Places, and their fingerprints `[n]` int64."""
    bad: list[tuple[Sequence[int], Tensor]] = field(default_factory=list)
    """Places, and their numbers of NaN and Inf `[n]` int64."""
    twins: dict[int, int] = field(default_factory=dict)
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


class Scanner:
    """Reads pieces and keeps the kernel's tables of the sequences it has read last.

    A sequence that was there before (same addresses, sizes and dtypes) needs one launch and no host work per tensor.
    """

    def __init__(self, *, kept_tables: int = 4) -> None:
        self._kept = kept_tables
        self._tables: dict[object, object] = {}

    @torch.no_grad()
    def scan(self, pieces: Sequence[Piece], *, finite: bool = False, fingerprints: bool = True) -> Scanned:
        """Fingerprints of `pieces`, and with `finite` the number of NaN and Inf in each.

        No synchronisation on a card. Without `fingerprints` they are taken only where they come for nothing.
        """
        unique, twins = _unique_places(pieces)
        scanned = Scanned(twins=twins)
        kernel = _kernel_module() if any(piece.tensor.is_cuda for piece in pieces) else None
        rest = unique
        if kernel is not None:
            chosen = [place for place in unique if kernel.takes(pieces[place])]
            self._scan_fused(kernel, pieces, chosen, finite, scanned)
            rest = sorted(set(unique).difference(chosen))
        for place in rest:
            values = pieces[place].cast()
            if finite:
                scanned.bad.append(([place], _count_nonfinite(values)))
            if fingerprints:
                scanned.sums.append(([place], fingerprint_tensor(values).view(1)))
        return scanned

    def _scan_fused(
        self, kernel: ModuleType, pieces: Sequence[Piece], chosen: Sequence[int], finite: bool, scanned: Scanned
    ) -> None:
        groups: dict[object, list[int]] = {}
        for place in chosen:
            piece = pieces[place]
            groups.setdefault((piece.tensor.device, piece.tensor.dtype, piece.dtype), []).append(place)
        for kind, places in groups.items():
            key = (kind, tuple((pieces[p].tensor.data_ptr(), pieces[p].tensor.numel()) for p in places))
            table = self._tables.pop(key, None) or kernel.build_table([pieces[p] for p in places])
            self._tables[key] = table  # the newest last
            while len(self._tables) > self._kept:
                del self._tables[next(iter(self._tables))]
            sums, bad = kernel.run(table, finite=finite)
            scanned.sums.append((places, sums))
            if bad is not None:
                scanned.bad.append((places, bad))


def _unique_places(pieces: Sequence[Piece]) -> tuple[list[int], dict[int, int]]:
    """Places of pieces that are memory of their own, and of the others with the place of their twin."""
    first: dict[object, int] = {}
    twins: dict[int, int] = {}
    for place, piece in enumerate(pieces):
        tensor = piece.tensor
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), piece.dtype)
        found = first.setdefault(where, place) if tensor.numel() else place
        if found != place:
            twins[place] = found
        elif not tensor.numel():
            first[where, place] = place
    return list(first.values()), twins


def _kernel_module() -> ModuleType | None:
    try:
        from rft_sync import scan_kernel
    except ImportError:  # a torch build without Triton
        return None
    return scan_kernel


def _count_nonfinite(values: Tensor) -> Tensor:
    """`[1]` int64. A sum carries NaN and Inf on and is cheaper than a mask; its own overflow gets the second look."""
    if not values.is_floating_point() or not values.numel():
        return torch.zeros(1, dtype=torch.int64, device=values.device)
    total = values.sum(dtype=torch.float64 if values.dtype == torch.float64 else torch.float32)
    if not values.is_cuda and bool(torch.isfinite(total)):
        return torch.zeros(1, dtype=torch.int64)
    return (~torch.isfinite(values)).sum().view(1)
