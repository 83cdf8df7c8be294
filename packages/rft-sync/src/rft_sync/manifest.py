"""The agreed list of what an update carries."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rft_sync.fusion import fused_groups
from rft_sync.parameters import Bucket, ParamMeta, plan_buckets


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything that one update sends, in order."""

    metadata: tuple[ParamMeta, ...]
    groups: tuple[tuple[str, ...], ...] = ()
    bucket_bytes: int = 1 << 28
    kind: str = "full"
    """`full` (weights under checkpoint names) or `adapter` (LoRA factors under PEFT names)."""
    adapter_config: str | None = None
    """PEFT configuration of the adapter as JSON."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names in order, aliases included."""
        return tuple(meta.name for meta in self.metadata)

    @property
    def nbytes(self) -> int:
        """Bytes sent, tied weights once."""
        return sum(meta.nbytes for meta in self.metadata)

    @property
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
