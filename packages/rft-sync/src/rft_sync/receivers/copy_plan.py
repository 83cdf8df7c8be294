"""The copies of an engine's own loader, recorded once and replayed at once.

The first update runs the loader under a dispatch mode that notes each copy from a sent tensor into a parameter. If
the copies account for every byte of every parameter exactly once, later updates replay them as one multi-tensor copy,
without names, slices or Python per parameter. Anything that cannot be followed (a value computed on the way, a
scalar read to the host, a byte that nobody wrote) refuses the plan, and the loader goes on being used.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rft_sync.parameters import Bucket, ParamMeta


@dataclass(frozen=True, slots=True)
class Region:
    """A strided piece of a named tensor; `offset` in elements from its start."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def dense(self) -> bool:
        """Whether the piece is one run of elements in order."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != step:
                return False
            step *= size
        return True

    def of(self, tensor: Tensor) -> Tensor:
        """The piece as a view."""
        return tensor.detach().as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Copy:
    """One recorded copy. `source` is None for padding, which is set to zero."""

    source: Region | None
    target: Region
    dtype: torch.dtype
    """Of the target."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """All copies of one full update, by sent tensor."""

    copies: Mapping[str, tuple[Copy, ...]]
    padding: tuple[Copy, ...]
    layout: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """Parameters of the model at the time of recording."""

    def fits(self, model: nn.Module) -> bool:
        """Whether `model` still has the parameters that were recorded."""
        return self.layout == layout_of(model)

    def resolve(self, model: nn.Module) -> "ResolvedPlan":
        """The plan with the views of `model`'s parameters that it writes to."""
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        targets = {
            name: tuple((copy.source, copy.target.of(parameters[copy.target.name])) for copy in copies)
            for name, copies in self.copies.items()
        }
        padding = tuple(copy.target.of(parameters[copy.target.name]) for copy in self.padding)
        return ResolvedPlan(self, targets, padding, _addresses(model))


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    """A `CopyPlan` on one model: sent name -> (piece of the sent tensor, view of the engine's parameter)."""

    plan: CopyPlan
    targets: Mapping[str, tuple[tuple[Region | None, Tensor], ...]]
    padding: tuple[Tensor, ...]
    addresses: tuple[int, ...]

    def fits(self, model: nn.Module) -> bool:
        """Whether `model` still has its parameters where they were."""
        return self.addresses == _addresses(model) and self.plan.fits(model)

    def takes(self, metadata: Sequence[ParamMeta], tensors: Mapping[str, Tensor]) -> bool:
        """Whether every tensor is dense, on the engine's device, and rounded once on its way."""
        for meta in metadata:
            tensor = tensors[meta.name]
            for _, target in self.targets.get(meta.name, ()):
                if not tensor.is_contiguous() or tensor.device != target.device:
                    return False
                if target.dtype != meta.dtype and tensor.dtype != meta.dtype:
                    return False
        return True

    def pairs(self, name: str, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(piece of `tensor`, view of the engine) for every copy of the sent tensor `name`, which is dense."""
        return [(region.of(tensor), target) for region, target in self.targets.get(name, ()) if region is not None]

    @torch.no_grad()
    def replay(self, bucket: Bucket) -> None:
        """Copy the tensors of a filled bucket to where the loader put them, in one multi-tensor copy."""
        pairs = [pair for name, tensor in bucket for pair in self.pairs(name, tensor.contiguous())]
        if pairs:
            torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])

    @torch.no_grad()
    def zero_padding(self) -> None:
        """Set the padding to zero: memory that slept does not come back with its content."""
        for target in self.padding:
            target.zero_()


def layout_of(model: nn.Module) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
    """Names, shapes and dtypes of the parameters of `model`."""
    return tuple((name, tuple(p.shape), p.dtype) for name, p in model.named_parameters())


def _addresses(model: nn.Module) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in model.parameters())


@dataclass(slots=True)
class CopyRecorder:
    """Watches a loader over the buckets of one update.

    Attributes:
        refusal: Why no plan can be made; empty while it still can.
    """

    model: nn.Module
    refusal: str = ""
    copies: dict[str, list[Copy]] = field(default_factory=dict)
    padding: list[Copy] = field(default_factory=list)

    @contextmanager
    def watch(self, bucket: Bucket) -> Iterator[list[tuple[str, Tensor]]]:
        """Give the pairs to hand to the loader; the copies made inside the context are noted."""
        pairs = [(name, tensor.contiguous()) for name, tensor in bucket]
        with _Watch(self, pairs):
            yield pairs

    def plan(self) -> CopyPlan | None:
        """The plan, or None with `refusal` set."""
        if not self.refusal:
            self.refusal = self._coverage_gap()
        if self.refusal:
            return None
        copies = {name: tuple(found) for name, found in self.copies.items()}
        return CopyPlan(copies, tuple(self.padding), layout_of(self.model))

    def _coverage_gap(self) -> str:
        """The first parameter that was not written exactly once, element by element."""
        by_target: dict[str, list[Region]] = {}
        for found in self.copies.values():
            for copy in found:
                by_target.setdefault(copy.target.name, []).append(copy.target)
        for copy in self.padding:
            by_target.setdefault(copy.target.name, []).append(copy.target)
        for name, parameter in self.model.named_parameters():
            if not parameter.is_contiguous():
                return f"parameter {name} is not contiguous"
            if parameter.numel() == 0:
                return f"parameter {name} is empty: its live layout is another one"
            least, most = _times_written(parameter.numel(), by_target.get(name, ()))
            if (least, most) != (1, 1):
                return f"parameter {name} was written {least} to {most} times per element"
        return ""

    def note(self, copy: Copy) -> None:
        """Add a copy; the same bytes written again under an alias count once."""
        found = self.padding if copy.source is None else self.copies.setdefault(copy.source.name, [])
        if copy not in found:
            found.append(copy)


def _times_written(numel: int, regions: Sequence[Region]) -> tuple[int, int]:
    """How often the elements of a flat tensor lie in `regions`: (least, most)."""
    if all(region.dense for region in regions):  # runs of elements: count at their ends
        change = {0: 0, numel: 0}
        for region in regions:
            end = region.offset + math.prod(region.shape)
            change[region.offset] = change.get(region.offset, 0) + 1
            change[end] = change.get(end, 0) - 1
        ends = sorted(change)
        depths = list(accumulate(change[place] for place in ends))
        return min(depths[:-1]), max(depths[:-1])
    if any(
        stride == 0 and size > 1
        for region in regions
        for size, stride in zip(region.shape, region.strides, strict=True)
    ):
        return 0, 2  # one element several times over
    counts = torch.zeros(numel, dtype=torch.int16)
    for region in regions:
        counts.as_strided(region.shape, region.strides, region.offset).add_(1)
    return int(counts.min()), int(counts.max())


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every tensor operation of the loader."""

    def __init__(self, recorder: CopyRecorder, pairs: Sequence[tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._sources: dict[int, list[tuple[str, Tensor]]] = {}
        held: set[tuple[int, int]] = set()
        for name, tensor in pairs:
            place = (tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()))
            if place not in held or tensor.numel() == 0:  # a tied name is the name of the first
                held.add(place)
                self._sources.setdefault(place[0], []).append((name, tensor))
        self._targets: dict[int, tuple[str, Tensor]] = {}
        for name, parameter in recorder.model.named_parameters():
            self._targets.setdefault(parameter.untyped_storage().data_ptr(), (name, parameter))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        try:
            self._observe(func, args)
        except Exception as error:  # noqa: BLE001 -- watching must not break the load; the plan is refused instead
            self._refuse(f"{type(error).__name__} while recording: {error}")
        return result

    def _observe(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func.__name__
        if name.startswith("copy_."):
            self._observe_copy(args[0], args[1])
        elif name.startswith("zero_.") or (name.startswith("fill_.") and _is_zero(args[1])):
            if self._target(args[0]) is not None:
                if args[0].numel() == 1:
                    self._refuse("a single element was filled; its value may come from a sent tensor")
                self._recorder.note(Copy(None, self._region(*self._require_target(args[0]), args[0]), args[0].dtype))
        elif name.startswith("_local_scalar_dense"):
            if self._source(args[0]) is not None:
                self._refuse("a sent tensor was read to the host")
        elif _writes(func) and isinstance(args[0], Tensor) and self._target(args[0]) is not None:
            self._refuse(f"a parameter was written by {name}")

    def _observe_copy(self, target: Tensor, source: Tensor) -> None:
        found = self._target(target)
        if found is None:
            if self._source(target) is None and self._source(source) is not None:
                return  # a copy elsewhere; if it comes back, its source is unknown and the plan is refused
            return
        origin = self._source(source)
        if origin is None or source.shape != target.shape:
            self._refuse(f"{found[0]} was written from a tensor that was not sent")
            return
        self._recorder.note(Copy(self._region(*origin, source), self._region(*found, target), target.dtype))

    def _refuse(self, reason: str) -> None:
        self._recorder.refusal = self._recorder.refusal or reason

    def _target(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        return self._targets.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def _require_target(self, tensor: Tensor) -> tuple[str, Tensor]:
        found = self._target(tensor)
        assert found is not None
        return found

    def _source(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        """The sent tensor whose bytes hold the first element of `tensor`."""
        first = tensor.storage_offset() * tensor.element_size()
        for name, whole in self._sources.get(tensor.untyped_storage().data_ptr(), ()):
            begin = whole.storage_offset() * whole.element_size()
            if begin <= first < begin + max(1, whole.nbytes) and whole.dtype == tensor.dtype:
                return name, whole
        return None

    def _region(self, name: str, whole: Tensor, piece: Tensor) -> Region:
        offset = int(piece.storage_offset() - whole.storage_offset())
        return Region(name, tuple(piece.shape), tuple(piece.stride()), offset)


def _is_zero(value: Any) -> bool:
    return not isinstance(value, Tensor) and value == 0


def _writes(func: Any) -> bool:
    """Whether the operation writes into its first argument."""
    arguments = func._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and bool(arguments[0].alias_info.is_write)
