"""What an update did and cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """One finished update, as seen by this rank."""

    version: int
    """Version that the engine now has."""
    tensors_sent: int
    tensors_loaded: int
    tensors_expected: int
    """The three counts are equal, aliases included; anything else is an error and not a report."""
    parameters: int
    buffers: int
    aliases: int
    skipped_buffers: int
    """Non-persistent buffers, which are not sent."""
    nbytes: int
    """Bytes sent, tied weights once."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Phase -> seconds of this rank: wake, gather, cast, load, finish, verify, total. `cast` is not part of `gather`.
    Device work is waited for at the end of the update only."""
    gigabytes_per_second: float = 0.0
    """`nbytes` over the total, in 1e9 bytes."""
    peak_extra_bytes: int = 0
    """Most bytes of buffers and casts that the source held at once."""
    fingerprint: str = ""
    """SHA-256 over the fingerprints of the verified tensors (as sent)."""
    tensors_verified: int = 0
    """Tensors whose read-back from the engine was compared; 0 where the engine cannot be read."""
    casts: Mapping[str, int] = field(default_factory=dict)
    """`float32->bfloat16` -> number of tensors cast before they were gathered."""

    def __str__(self) -> str:
        """One line for a log."""
        phases = ", ".join(f"{name} {value:.3f}" for name, value in self.seconds.items())
        casts = ", ".join(f"{count} {name}" for name, count in self.casts.items()) or "none"
        return (
            f"weights version {self.version}: {self.tensors_loaded} tensors ({self.aliases} aliases, {self.buffers} "
            f"buffers), {self.nbytes / 1e6:.1f} MB, {self.gigabytes_per_second:.2f} GB/s, verified "
            f"{self.tensors_verified}, casts {casts}, seconds: {phases}"
        )
