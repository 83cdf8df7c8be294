"""What is sent, as data: one description per tensor, and the buckets that carry them. No communication here."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rft_sync.errors import IncompleteGroup, ShapeMismatch, UnknownTensor

ALIGNMENT_BYTES = 16  # every tensor of a flat buffer starts on this boundary, so that any dtype can view it


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamMeta:
    """One tensor under its checkpoint name, described alike on every rank.

    Raises:
        ValueError: An empty name, a negative size, or a tensor that is its own alias.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """The dtype in which it is sent."""
    buffer: bool = False
    """A persistent buffer and not a parameter."""
    alias_of: str | None = None
    """Name of the tensor that it shares memory with (tied weights): sent under both names, its bytes once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if not self.name:
            raise ValueError("ParamMeta.name is empty; give the checkpoint name of the tensor")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"ParamMeta.shape of {self.name} is {self.shape}; sizes must be 0 or more")
        if self.alias_of == self.name:
            raise ValueError(f"ParamMeta.alias_of of {self.name} is itself; leave it None for an ordinary tensor")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that are sent for it: 0 for an alias."""
        return 0 if self.alias_of is not None else self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatTensor:
    """The place of one tensor in a flat byte buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """First byte in the buffer; a multiple of `ALIGNMENT_BYTES`."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, without the padding after it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """The tensor inside `flat` (uint8 `[bytes]`), sharing its memory."""
        return flat[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors that travel together. A plan until `filled`; then it iterates over `(name, tensor)`.

    The tensors of a filled bucket are only good until the receiver's `load` has returned (and the handle that it
    may return is done): their memory is reused for the next bucket. A receiver that keeps one must clone it.
    """

    index: int
    metadata: tuple[ParamMeta, ...]
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Checkpoint names in the order of the manifest, aliases included."""
        return tuple(meta.name for meta in self.metadata)

    @property
    def entries(self) -> tuple[FlatTensor, ...]:
        """Layout of the bucket as one flat buffer; an alias lies where its original lies."""
        offsets: dict[str, int] = {}
        end = 0
        for meta in self.metadata:
            if meta.alias_of is None:
                offsets[meta.name] = end
                end += _aligned(meta.nbytes)
        return tuple(
            FlatTensor(name=meta.name, shape=meta.shape, dtype=meta.dtype, offset=offsets[meta.alias_of or meta.name])
            for meta in self.metadata
        )

    @property
    def nbytes(self) -> int:
        """Size of the flat buffer, alignment included."""
        return sum(_aligned(meta.nbytes) for meta in self.metadata)

    def filled(self, tensors: Mapping[str, Tensor]) -> "Bucket":
        """The same bucket with its tensors.

        Raises:
            UnknownTensor: A name of the plan is missing.
            ShapeMismatch: A tensor has another shape or dtype than planned.
        """
        missing = [name for name in self.names if name not in tensors]
        if missing:
            raise UnknownTensor(f"bucket {self.index} lacks {missing}; gather all of its names", missing)
        for meta in self.metadata:
            tensor = tensors[meta.name]
            if tuple(tensor.shape) != meta.shape or tensor.dtype != meta.dtype:
                raise ShapeMismatch(
                    f"{meta.name} came as {tuple(tensor.shape)} {tensor.dtype} but {meta.shape} {meta.dtype} was "
                    "planned; call metadata() again after changing the model",
                    [meta.name],
                )
        return replace(self, tensors={name: tensors[name] for name in self.names})

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """`(name, tensor)` pairs of a filled bucket; nothing for a plan."""
        return iter(self.tensors.items())

    def __len__(self) -> int:
        """Number of names, aliases included."""
        return len(self.metadata)

    def pack(self, flat: Tensor) -> None:
        """Write the tensors of a filled bucket into `flat` (uint8 `[>= nbytes]`) in logical order, ties once."""
        for entry, meta in zip(self.entries, self.metadata, strict=True):
            if meta.alias_of is None:
                entry.view(flat).copy_(self.tensors[entry.name])

    def unpacked(self, flat: Tensor) -> "Bucket":
        """The bucket filled with views of `flat` (uint8 `[>= nbytes]`)."""
        return replace(self, tensors={entry.name: entry.view(flat) for entry in self.entries})


def _units(metadata: Sequence[ParamMeta], groups: Iterable[Iterable[str]]) -> list[list[ParamMeta]]:
    """Join tensors that must travel together: fused groups, and aliases with their originals."""
    position = {meta.name: index for index, meta in enumerate(metadata)}
    leader = list(range(len(metadata)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    def join(names: Sequence[str]) -> None:
        for name in names[1:]:
            first, other = sorted((find(position[names[0]]), find(position[name])))
            leader[other] = first

    for group in groups:
        names = list(group)
        unknown = [name for name in names if name not in position]
        if unknown:
            raise IncompleteGroup(f"group {names} names tensors that are not sent: {unknown}", unknown)
        join(names)
    for meta in metadata:
        if meta.alias_of is not None:
            if meta.alias_of not in position:
                raise UnknownTensor(f"{meta.name} is an alias of {meta.alias_of}, which is not sent", [meta.name])
            join([meta.alias_of, meta.name])
    units: dict[int, list[ParamMeta]] = {}
    for index, meta in enumerate(metadata):
        units.setdefault(find(index), []).append(meta)
    return list(units.values())


def plan_buckets(
    metadata: Sequence[ParamMeta], bucket_bytes: int, groups: Iterable[Iterable[str]] = ()
) -> list[Bucket]:
    """Cut `metadata` into buckets of at most `bucket_bytes`, in order, without splitting a group or a tied pair.

    A group larger than `bucket_bytes` becomes a bucket of its own. Pure: sizes are the global shapes, so every rank
    finds the same plan.

    Args:
        metadata: Tensors to send; names must be unique.
        bucket_bytes: Limit of `Bucket.nbytes`.
        groups: Names that the engine fuses (see `fused_groups`).

    Raises:
        ValueError: `bucket_bytes` is below 1 or a name occurs twice.
        IncompleteGroup: A group names a tensor that is not in `metadata`.
        UnknownTensor: An alias of a tensor that is not in `metadata`.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; give the size of a bucket in bytes, for example 2**28")
    names = [meta.name for meta in metadata]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"metadata names tensors twice: {twice}")
    buckets: list[Bucket] = []
    pending: list[ParamMeta] = []
    size = 0
    for unit in _units(metadata, groups):
        nbytes = sum(_aligned(meta.nbytes) for meta in unit)
        if pending and size + nbytes > bucket_bytes:
            buckets.append(Bucket(index=len(buckets), metadata=tuple(pending)))
            pending, size = [], 0
        pending += unit
        size += nbytes
    if pending:
        buckets.append(Bucket(index=len(buckets), metadata=tuple(pending)))
    return buckets
