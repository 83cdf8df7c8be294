"""The agreed list of what an update carries."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rft_sync.fusion import fused_groups
from rft_sync.parameters import Bucket, ParamMeta, plan_buckets


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that one update sends, in order. What follows from it is computed once."""

    metadata: tuple[ParamMeta, ...]
    groups: tuple[tuple[str, ...], ...] = ()
    bucket_bytes: int = 1 << 28
    kind: str = "full"
    """`full` (weights under checkpoint names) or `adapter` (LoRA factors under PEFT names)."""
    adapter_config: str | None = None
    """PEFT configuration of the adapter as JSON."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names in order, aliases included."""
        return tuple(meta.name for meta in self.metadata)

    @cached_property
    def known(self) -> frozenset[str]:
        """All names."""
        return frozenset(self.names)

    @cached_property
    def nbytes(self) -> int:
        """Bytes sent, tied weights once."""
        return sum(meta.nbytes for meta in self.metadata)

    @cached_property
    def aliases(self) -> int:
        """How many names are those of tied tensors."""
        return sum(meta.alias_of is not None for meta in self.metadata)

    @cached_property
    def buffer_count(self) -> int:
        """How many names are those of buffers, ties left out."""
        return sum(meta.buffer and meta.alias_of is None for meta in self.metadata)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything that is planned; equal on all ranks or nothing is sent."""
        lines = [f"{self.kind} {self.bucket_bytes} {self.adapter_config}"]
        lines += [f"{m.name} {m.shape} {m.dtype} {m.buffer} {m.alias_of}" for m in self.metadata]
        lines += [" ".join(group) for group in self.groups]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def buckets(self) -> list[Bucket]:
        """The plan: `plan_buckets` over this manifest."""
        return plan_buckets(self.metadata, self.bucket_bytes, self.groups)


def build_manifest(
    metadata: Sequence[ParamMeta],
    *,
    bucket_bytes: int,
    groups: Iterable[Iterable[str]] = (),
    kind: str = "full",
    adapter_config: str | None = None,
) -> Manifest:
    """Manifest of `metadata` with the fused groups told from the names, and `groups` besides."""
    names = [meta.name for meta in metadata]
    known = set(names)
    extra = [tuple(group) for group in groups]
    found = [group for group in fused_groups(names) if known.issuperset(group)]
    return Manifest(
        metadata=tuple(metadata),
        groups=tuple(found + extra),
        bucket_bytes=bucket_bytes,
        kind=kind,
        adapter_config=adapter_config,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A manifest with what follows from it."""

    manifest: Manifest
    names: tuple[str, ...]
    digest: str
    buckets: tuple[Bucket, ...]
    by_name: Mapping[str, ParamMeta]
    originals: tuple[ParamMeta, ...]
    """Aliases left out."""


class Planner:
    """Plans an update; the last plan serves again while the same list of tensors is sent in the same way."""

    def __init__(self) -> None:
        self._metadata: Sequence[ParamMeta] | None = None
        self._options: tuple[object, ...] = ()
        self._planned: Planned | None = None

    def plan(
        self,
        metadata: Sequence[ParamMeta],
        *,
        bucket_bytes: int,
        groups: tuple[tuple[str, ...], ...],
        kind: str,
        adapter_config: str | None,
    ) -> Planned:
        """The plan for `metadata`.

        Raises:
            IncompleteGroup: A group names a tensor that is not sent.
            UnknownTensor: An alias of a tensor that is not sent.
        """
        options = (bucket_bytes, groups, kind, adapter_config)
        # A tuple cannot have changed; a source of another kind may fill the same list anew.
        known = metadata is self._metadata and isinstance(metadata, tuple) and options == self._options
        if self._planned is None or not known:
            manifest = build_manifest(
                metadata, bucket_bytes=bucket_bytes, groups=groups, kind=kind, adapter_config=adapter_config
            )
            buckets = tuple(manifest.buckets())
            self._planned = Planned(
                manifest=manifest,
                names=manifest.names,
                digest=manifest.digest,
                buckets=buckets,
                by_name={meta.name: meta for meta in manifest.metadata},
                originals=tuple(meta for meta in manifest.metadata if meta.alias_of is None),
            )
            self._metadata, self._options = metadata, options
        return self._planned
