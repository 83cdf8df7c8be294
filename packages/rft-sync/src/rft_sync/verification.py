"""Does the engine hold what was sent? Fingerprints of the source against the read-back."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rft_sync.agreement import raise_together
from rft_sync.errors import ShapeMismatch, VerificationFailed
from rft_sync.fingerprint import fingerprint_tensor, read_fingerprints
from rft_sync.manifest import build_manifest
from rft_sync.receivers.protocol import ReadableReceiver
from rft_sync.sources.protocol import ParameterSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What was compared, and at what cost."""

    names: tuple[str, ...]
    fingerprint: str
    """SHA-256 over the fingerprints of the sent tensors in `names`; equal on all ranks that sent the same."""
    seconds: float


class ReadBackCheck:
    """One comparison: note what is sent, then compare with the engine.

    Args:
        receiver: The receiver that was or will be written; names that it cannot read back are left out.
        names: Names to compare.
    """

    def __init__(self, receiver: object, names: Sequence[str]) -> None:
        self._receiver = receiver
        self._wanted = set(names)
        self._whole: dict[str, Tensor] = {}
        self._parts: dict[str, list[Tensor]] = {}
        self.seconds = 0.0

    def note(self, name: str, tensor: Tensor) -> None:
        """Take the fingerprint of the sent `tensor`, while it is valid."""
        if name not in self._wanted:
            return
        begin = time.perf_counter()
        self._whole[name] = fingerprint_tensor(tensor)
        self.seconds += time.perf_counter() - begin

    def note_parts(self, name: str, tensor: Tensor) -> None:
        """Take the fingerprints of the pieces of `tensor` that this rank's engine holds."""
        if name not in self._wanted or not isinstance(self._receiver, ReadableReceiver):
            return
        begin = time.perf_counter()
        parts = self._receiver.expected_parts(name, tensor)
        same = len(parts) == 1 and parts[0] is tensor and name in self._whole
        self._parts[name] = [self._whole[name]] if same else [fingerprint_tensor(part) for part in parts]
        self.seconds += time.perf_counter() - begin

    def compare(self) -> Verification:
        """Read the engine and compare.

        Raises:
            VerificationFailed: Lists the tensors that differ.
        """
        begin = time.perf_counter()
        readable: tuple[str, ...] = ()
        live: list[Tensor] = []
        if isinstance(self._receiver, ReadableReceiver):
            readable = tuple(name for name in self._receiver.readable() if name in self._parts)
            live = [fingerprint_tensor(part) for name in readable for part in self._receiver.read_back(name)]
        sent = [part for name in readable for part in self._parts[name]]
        owners = [name for name in readable for _ in self._parts[name]]
        if len(sent) != len(live):
            raise ShapeMismatch(
                f"{len(sent)} pieces were sent and {len(live)} read back; the receiver's layout changed"
            )
        values = read_fingerprints([*sent, *live])
        wrong = sorted(
            {name for name, a, b in zip(owners, values[: len(sent)], values[len(sent) :], strict=True) if a != b}
        )
        whole = read_fingerprints(self._whole.values())
        listed = "\n".join(f"{name} {value}" for name, value in sorted(zip(self._whole, whole, strict=True)))
        self.seconds += time.perf_counter() - begin
        if wrong:
            raise VerificationFailed(
                f"{len(wrong)} of {len(readable)} tensors in the engine differ from what was sent: {wrong}; the engine "
                "must not generate until a full update succeeds",
                wrong,
            )
        return Verification(
            names=readable, fingerprint=hashlib.sha256(listed.encode()).hexdigest(), seconds=self.seconds
        )


def rotating_sample(names: Sequence[str], update: int, size: int) -> tuple[str, ...]:
    """Names to verify at `update` (0, 1, ...): all at the first, then `size` of them, going round."""
    if update == 0 or size >= len(names):
        return tuple(names)
    start = (update - 1) * size
    return tuple(names[(start + step) % len(names)] for step in range(size))


def verify(
    source: ParameterSource,
    receiver: Any,
    names: Sequence[str] | None = None,
    *,
    bucket_bytes: int = 1 << 28,
    group: dist.ProcessGroup | None = None,
) -> Verification:
    """Compare an engine with the source now, without sending. Collective over `group` and the source's ranks.

    A stale, swapped, permuted or changed tensor is found by name.

    Args:
        source: The training weights.
        receiver: A receiver that finished an update and can be read back.
        names: What to compare; everything by default.
        bucket_bytes: Size of the gathers.
        group: Ranks that verify together; the default group if None.

    Raises:
        VerificationFailed: On every rank, naming the tensors.
    """
    metadata = source.metadata()
    wanted = [meta.name for meta in metadata] if names is None else list(names)
    check = ReadBackCheck(receiver, wanted)
    error: Exception | None = None
    for bucket in build_manifest(metadata, bucket_bytes=bucket_bytes).buckets():
        chosen = [name for name in bucket.names if name in check._wanted]
        if not chosen:
            continue
        with source.gather(chosen) as tensors:
            try:
                for name, tensor in tensors.items():
                    check.note(name, tensor)
                    check.note_parts(name, tensor)
            except Exception as found:  # noqa: BLE001 -- raised on every rank below
                error = error or found
    raise_together(error, group)
    result: Verification | None = None
    try:
        result = check.compare()
    except Exception as found:  # noqa: BLE001 -- raised on every rank below
        error = found
    raise_together(error, group)
    assert result is not None
    return result
