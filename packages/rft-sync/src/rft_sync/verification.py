"""Does the engine hold what was sent? Fingerprints of the source against the read-back."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rft_sync.agreement import agree_on_digest, raise_together
from rft_sync.attendance import DEFAULT_SECONDS, await_ranks
from rft_sync.errors import ShapeMismatch, UnknownTensor, VerificationFailed
from rft_sync.manifest import build_manifest
from rft_sync.parameters import Bucket
from rft_sync.receivers.protocol import ReadableReceiver
from rft_sync.scan import Piece, Scanned, Scanner
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
        scanner: Takes the fingerprints.
    """

    def __init__(self, receiver: object, names: Sequence[str], scanner: Scanner) -> None:
        self._receiver = receiver
        self._scanner = scanner
        self._wanted = set(names)
        self._whole: list[tuple[Mapping[int, str], Scanned]] = []
        self._parts: list[tuple[Sequence[str], Scanned]] = []
        self._same: list[str] = []
        self.seconds = 0.0

    def wants(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that are compared."""
        return [name for name in names if name in self._wanted]

    def note(self, pieces: Mapping[str, Piece], scanned: Scanned | None = None) -> None:
        """Take the fingerprints of sent tensors, while they are valid.

        Args:
            pieces: Name -> what is sent.
            scanned: A scan of `pieces` in this order, whose fingerprints are used where it has them.
        """
        if not self._wanted:
            return
        begin = time.perf_counter()
        known = scanned.known() if scanned is not None else set()
        kept: dict[int, str] = {}
        missing: list[str] = []
        for place, name in enumerate(pieces):
            if name not in self._wanted:
                continue
            if place in known:
                kept[place] = name
            else:
                missing.append(name)
        if kept and scanned is not None:
            self._whole.append((kept, scanned))
        if missing:
            self._whole.append((dict(enumerate(missing)), self._scanner.scan([pieces[name] for name in missing])))
        self.seconds += time.perf_counter() - begin

    def note_parts(self, pieces: Mapping[str, Piece]) -> None:
        """Take the fingerprints of the pieces that this rank's engine holds, after they were loaded."""
        if not isinstance(self._receiver, ReadableReceiver):
            return
        begin = time.perf_counter()
        owners: list[str] = []
        parts: list[Piece] = []
        for name in self.wants(list(pieces)):
            found = self._receiver.expected_parts(name, pieces[name].tensor)
            if len(found) == 1 and _same_bytes(found[0], pieces[name]):
                self._same.append(name)
            else:
                owners += [name] * len(found)
                parts += found
        if parts:
            self._parts.append((owners, self._scanner.scan(parts)))
        self.seconds += time.perf_counter() - begin

    def compare(self) -> Verification:
        """Read the engine and compare.

        Raises:
            VerificationFailed: Lists the tensors that differ.
        """
        begin = time.perf_counter()
        live = self._read_back()
        whole = {names[p]: v for names, s in self._whole for p, v in s.fingerprints().items() if p in names}
        sent: dict[str, list[int]] = {name: [whole[name]] for name in self._same}
        for owners, scanned in self._parts:
            values = scanned.fingerprints()
            for place, name in enumerate(owners):
                sent.setdefault(name, []).append(values[place])
        changed = sorted(name for name, values in live.items() if len(values) != len(sent[name]))
        if changed:
            raise ShapeMismatch(f"other pieces of {changed} were sent than read back; the receiver's layout changed")
        wrong = sorted(name for name, values in live.items() if values != sent[name])
        listed = "\n".join(f"{name} {value}" for name, value in sorted(whole.items()))
        self.seconds += time.perf_counter() - begin
        if wrong:
            raise VerificationFailed(
                f"{len(wrong)} of {len(live)} tensors in the engine differ from what was sent: {wrong}; the engine "
                "must not generate until a full update succeeds",
                wrong,
            )
        digest = hashlib.sha256(listed.encode()).hexdigest()
        return Verification(names=tuple(live), fingerprint=digest, seconds=self.seconds)

    def _read_back(self) -> dict[str, list[int]]:
        """Name -> fingerprints of the live pieces, of the noted names that can be read."""
        if not isinstance(self._receiver, ReadableReceiver):
            return {}
        noted = {*self._same, *(name for owners, _ in self._parts for name in owners)}
        readable = [name for name in self._receiver.readable() if name in noted]
        parts = [(name, Piece(part, part.dtype)) for name in readable for part in self._receiver.read_back(name)]
        values = self._scanner.scan([piece for _, piece in parts]).fingerprints()
        live: dict[str, list[int]] = {name: [] for name in readable}
        for place, (name, _) in enumerate(parts):
            live[name].append(values[place])
        return live


def _same_bytes(part: Piece, whole: Piece) -> bool:
    """Whether `part` is all of `whole`, so that its fingerprint is known."""
    a, b = part.tensor, whole.tensor
    same = a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.dtype == b.dtype and a.device == b.device
    return same and a.is_contiguous() and b.is_contiguous() and part.dtype == whole.dtype


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
    attendance_seconds: float = DEFAULT_SECONDS,
) -> Verification:
    """Compare an engine with the source now, without sending. Collective over `group` and the source's ranks.

    A stale, swapped, permuted or changed tensor is found by name.

    Args:
        source: The training weights.
        receiver: A receiver that finished an update and can be read back.
        names: What to compare; everything by default.
        bucket_bytes: Size of the gathers.
        group: Ranks that verify together; the default group if None.
        attendance_seconds: How long to wait for all of them to come.

    Raises:
        ManifestMismatch: A rank of the group did not come, or the ranks would compare different tensors.
        UnknownTensor: `names` holds one that the source does not send.
        VerificationFailed: On every rank, naming the tensors.
    """
    await_ranks("verify", group, attendance_seconds)
    check, buckets = _planned(source, receiver, names, bucket_bytes, group)
    error: Exception | None = None
    for bucket in buckets:
        chosen = check.wants(bucket.names)
        if not chosen:
            continue
        try:
            with source.gather(chosen) as tensors:
                pieces = {name: Piece(tensor, tensor.dtype) for name, tensor in tensors.items()}
                check.note(pieces)
                check.note_parts(pieces)
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


def _planned(
    source: ParameterSource,
    receiver: object,
    names: Sequence[str] | None,
    bucket_bytes: int,
    group: dist.ProcessGroup | None,
) -> tuple[ReadBackCheck, list[Bucket]]:
    """What all ranks compare. Collective over `group`."""
    error: Exception | None = None
    digest: str | None = None
    check, buckets = ReadBackCheck(receiver, (), Scanner()), list[Bucket]()
    try:
        manifest = build_manifest(source.metadata(), bucket_bytes=bucket_bytes)
        wanted = list(manifest.names) if names is None else list(names)
        unknown = sorted(set(wanted) - set(manifest.names))
        if unknown:
            raise UnknownTensor(f"no such tensors at the source: {unknown}; names come from metadata()", unknown)
        check, buckets = ReadBackCheck(receiver, wanted, Scanner()), manifest.buckets()
        digest = f"{manifest.digest} {sorted(wanted)}"
    except Exception as found:  # noqa: BLE001 -- raised on every rank by the agreement
        error = found
    agree_on_digest(digest, error, group)
    return check, buckets
