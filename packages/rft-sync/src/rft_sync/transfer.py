"""Weights for an engine that lives in another process: flat buckets over a process group, two in flight.

The receivers answer to the plan before the first byte, so that what one of them cannot take is refused with nothing
written. The sender fills one buffer while the other travels. Each buffer starts with a header: a sender that fails
tells the receivers so, and the fingerprint of the payload tells them that it came as it was sent. Receivers answer at
the end, so that a receiver that fails, or holds something else than it got, tells the trainers.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rft_sync import errors
from rft_sync.agreement import agree_on_digest, as_sync_error, is_distributed, raise_together
from rft_sync.attendance import DEFAULT_SECONDS, await_ranks
from rft_sync.errors import ManifestMismatch, VerificationFailed, WeightSyncError
from rft_sync.fingerprint import fingerprint, fingerprint_tensor
from rft_sync.manifest import Manifest, build_manifest
from rft_sync.parameters import ALIGNMENT_BYTES, Bucket, ParamMeta
from rft_sync.receivers.protocol import WeightReceiver
from rft_sync.scan import Piece, Scanner
from rft_sync.sources.protocol import ParameterSource
from rft_sync.update import check_finite
from rft_sync.verification import ReadBackCheck
from rft_sync.wire import broadcast_text, gather_values, wire_device

# First byte: 0 the payload is good, 1 the sender failed. Last eight: the payload's fingerprint.
_HEADER_BYTES = ALIGNMENT_BYTES
_FINGERPRINT = slice(8, 16)
_BUFFERS = 2


def manifest_to_json(manifest: Manifest, version: int) -> str:
    """The manifest as text: nothing is pickled between processes of different programs."""
    tensors = [
        [m.name, list(m.shape), str(m.dtype).removeprefix("torch."), m.buffer, m.alias_of] for m in manifest.metadata
    ]
    fields = {
        "version": version,
        "bucket_bytes": manifest.bucket_bytes,
        "kind": manifest.kind,
        "adapter_config": manifest.adapter_config,
        "groups": [list(group) for group in manifest.groups],
        "tensors": tensors,
        "digest": manifest.digest,
    }
    return json.dumps(fields)


def manifest_from_json(text: str) -> tuple[Manifest, int]:
    """The manifest and the version.

    Raises:
        ManifestMismatch: The digest does not fit: sender and receiver read the list differently.
    """
    fields: Mapping[str, Any] = json.loads(text)
    metadata = tuple(
        ParamMeta(name=name, shape=tuple(shape), dtype=getattr(torch, dtype), buffer=buffer, alias_of=alias)
        for name, shape, dtype, buffer, alias in fields["tensors"]
    )
    manifest = Manifest(
        metadata=metadata,
        groups=tuple(tuple(group) for group in fields["groups"]),
        bucket_bytes=fields["bucket_bytes"],
        kind=fields["kind"],
        adapter_config=fields["adapter_config"],
    )
    if manifest.digest != fields["digest"]:
        raise ManifestMismatch("the received manifest has another digest; use one version of rft-sync on both sides")
    return manifest, int(fields["version"])


def _refusal_to_json(error: BaseException | None) -> str:
    """Why the sender has no plan."""
    known = as_sync_error(error or WeightSyncError("no plan"))
    return json.dumps({"error": known.message, "kind": type(known).__name__, "names": known.names})


def _refusal_from_json(text: str) -> WeightSyncError:
    """The sender's error, of its own class where that is one of the family."""
    fields: Mapping[str, Any] = json.loads(text)
    found = getattr(errors, fields.get("kind", ""), None)
    kind = found if isinstance(found, type) and issubclass(found, WeightSyncError) else WeightSyncError
    return kind(f"the sender could not plan the update: {fields['error']}", fields.get("names", ()))


def _is_member(group: dist.ProcessGroup | None) -> bool:
    """`new_group` gives outsiders a number in place of a group."""
    return not isinstance(group, int)


def _payload(buffer: Tensor, bucket: Bucket) -> Tensor:
    return buffer[_HEADER_BYTES : _HEADER_BYTES + bucket.nbytes]


def _seal(buffer: Tensor, bucket: Bucket, *, failed: bool) -> None:
    """Write the header of a buffer that holds `bucket`, or nothing when the sender `failed`."""
    buffer[0] = int(failed)
    if not failed:
        found = fingerprint_tensor(_payload(buffer, bucket))
        buffer[_FINGERPRINT].view(torch.int64).copy_(found.view(1))


def _opened(buffer: Tensor, bucket: Bucket) -> Bucket | None:
    """`bucket` with the tensors in `buffer`; None when the sender failed.

    Raises:
        VerificationFailed: The bytes are not those that were sent.
    """
    if int(buffer[0]) != 0:
        return None
    if fingerprint(_payload(buffer, bucket)) != int(buffer[_FINGERPRINT].view(torch.int64)):
        raise VerificationFailed(
            f"bucket {bucket.index} was changed on its way; it holds {list(bucket.names)}", bucket.names
        )
    return bucket.unpacked(buffer[_HEADER_BYTES:])


class _Ring:
    """Two wire buffers, each with the work that still reads or writes it."""

    def __init__(self, buckets: list[Bucket], device: torch.device) -> None:
        nbytes = _HEADER_BYTES + max((bucket.nbytes for bucket in buckets), default=0)
        count = min(_BUFFERS, max(1, len(buckets)))
        self._buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        self._work: list[dist.Work | None] = [None] * count

    def buffer(self, index: int) -> Tensor:
        """The buffer of bucket `index`, once nothing uses it."""
        place = index % len(self._buffers)
        work, self._work[place] = self._work[place], None
        if work is not None:
            work.wait()
        return self._buffers[place]

    def broadcast(self, index: int, nbytes: int, src: int, group: dist.ProcessGroup | None) -> None:
        """Start the broadcast of bucket `index`. Collective over `group`."""
        place = index % len(self._buffers)
        self._work[place] = dist.broadcast(
            self._buffers[place][: _HEADER_BYTES + nbytes], src, group=group, async_op=True
        )

    def drain(self) -> None:
        """Wait for everything that was started."""
        for index in range(len(self._buffers)):
            self.buffer(index)


def send_weights(
    source: ParameterSource,
    *,
    version: int,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    trainer_group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 1 << 28,
    finite_only: bool = True,
    attendance_seconds: float = DEFAULT_SECONDS,
) -> None:
    """Send the weights of `source` to the processes that call `receive_weights`.

    Collective over the trainers: every trainer rank calls it, since all of them gather; only `src` also takes part in
    `group`. Rank `src` gathers the next bucket while the last one travels.

    Args:
        source: Training weights.
        version: Version that the receivers shall have.
        src: Global rank of the sending trainer.
        group: `src` and the receivers; a trainer outside it passes what `new_group` returned to it.
        trainer_group: The trainer ranks, for agreement on failure; needed when there are several.
        bucket_bytes: Size of a bucket; the sender holds two of them.
        finite_only: Refuse NaN and Inf.
        attendance_seconds: How long to wait for all of `trainer_group` to make the call.

    Raises:
        ManifestMismatch: A trainer did not make this call; on those that did, and on the receivers.
        WeightSyncError: On every trainer, when the sender or any receiver failed.
    """
    sending = is_distributed() and dist.get_rank() == src
    if sending and not _is_member(group):
        raise ManifestMismatch(f"rank {src} is the sender but not in the group; make the group with it")
    absent = _absence(trainer_group, attendance_seconds)
    manifest, error = _plan(source, bucket_bytes, trainer_group) if absent is None else (None, absent)
    if sending:
        text = _refusal_to_json(error) if manifest is None else manifest_to_json(manifest, version)
        broadcast_text(text, src, group)
    if absent is not None:
        raise absent
    if manifest is not None and sending:
        error = _first_failure(None, group)  # whether every receiver can take it
    if trainer_group is not None:
        raise_together(error, trainer_group)
    if manifest is not None:
        # A sender that was refused still gathers, where it cannot tell the other trainers.
        refused, streams = error, sending and error is None
        found = _stream(source, manifest.buckets(), src if streams else None, group, finite_only)
        error = refused or found
        if streams:
            error = _first_failure(error, group) or _first_failure(None, group)  # after loading, after finishing
        if hasattr(source, "release"):
            source.release()
    if trainer_group is not None:
        raise_together(error, trainer_group)
    elif error is not None:
        raise as_sync_error(error) from error


def _absence(trainer_group: dist.ProcessGroup | None, seconds: float) -> ManifestMismatch | None:
    """Which trainers did not come; None when all are here. No collective."""
    try:
        if trainer_group is not None:
            await_ranks("send_weights", trainer_group, seconds)
    except ManifestMismatch as error:
        return error
    return None


def _plan(
    source: ParameterSource, bucket_bytes: int, trainer_group: dist.ProcessGroup | None
) -> tuple[Manifest | None, Exception | None]:
    """The manifest that all trainers agree on, or why there is none. Collective over `trainer_group`."""
    manifest: Manifest | None = None
    error: Exception | None = None
    try:
        manifest = build_manifest(
            source.metadata(),
            bucket_bytes=bucket_bytes,
            kind=getattr(source, "kind", "full"),
            adapter_config=source.adapter_config() if hasattr(source, "adapter_config") else None,
        )
        manifest.buckets()
    except Exception as found:  # noqa: BLE001 -- told to the receivers, raised by every trainer
        error = found
    if trainer_group is not None:
        try:
            agree_on_digest(None if manifest is None else manifest.digest, error, trainer_group)
        except WeightSyncError as found:
            return None, found
    return (manifest if error is None else None), error


def _stream(
    source: ParameterSource, buckets: list[Bucket], src: int | None, group: dist.ProcessGroup | None, finite_only: bool
) -> Exception | None:
    """Gather every bucket; where `src` is given, send it. Collective over the source's ranks, and `group` for `src`."""
    ring = _Ring(buckets, wire_device(group)) if src is not None else None
    scanner = Scanner()
    error: Exception | None = None
    for index, bucket in enumerate(buckets):
        buffer = ring.buffer(index) if ring is not None else None
        try:
            with source.gather(bucket.names) as tensors:
                if buffer is not None and error is None:
                    filled = bucket.filled(tensors)
                    if finite_only:
                        pieces = [Piece(tensor, tensor.dtype) for _, tensor in filled]
                        check_finite(filled.names, scanner.scan(pieces, finite=True, fingerprints=False))
                    filled.pack(buffer[_HEADER_BYTES:])
        except Exception as found:  # noqa: BLE001 -- the receivers are told in the header, all trainers at the end
            error = error or found
        if ring is not None and buffer is not None and src is not None:
            _seal(buffer, bucket, failed=error is not None)
            ring.broadcast(index, bucket.nbytes, src, group)
    if ring is not None:
        ring.drain()
    return error


def _first_failure(error: Exception | None, group: dist.ProcessGroup | None) -> WeightSyncError | None:
    """The first failure among sender and receivers. Collective over `group`."""
    answers = gather_values(None if error is None else as_sync_error(error), group)
    return next((answer for answer in answers if answer is not None), None)


def receive_weights(
    receiver: WeightReceiver,
    *,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    on_bucket: Callable[[Bucket], None] | None = None,
    verify: bool = True,
) -> int:
    """Receive one update from `send_weights` into `receiver`. Collective over `group`.

    The next bucket arrives while this one is loaded. What arrives is compared with what was sent, and what the engine
    holds in the end with what arrived.

    Args:
        receiver: The engine's side.
        src: Global rank of the sending trainer.
        group: The sender and the receivers.
        on_bucket: Called after each bucket was loaded.
        verify: Read every tensor back that the receiver can show.

    Returns:
        The version that the receiver now has.

    Raises:
        WeightSyncError: On every receiver and trainer; the receiver is unusable until a full update succeeds, unless
            a receiver refused the plan, before anything was written.
    """
    text = broadcast_text(None, src, group)
    if "error" in json.loads(text):
        raise _refusal_from_json(text)
    manifest, version = _started(receiver, text, group)
    check = ReadBackCheck(receiver, manifest.names if verify else (), Scanner())
    error = _drain_into(receiver, manifest, src, group, on_bucket, check)
    failure = _first_failure(error, group)
    if failure is None:
        try:
            receiver.finish(version)
            check.compare()
        except Exception as found:  # noqa: BLE001 -- answered in the second round
            error = found
        failure = _first_failure(error, group)
    if failure is None:
        return version
    receiver.abort(str(failure))
    raise failure from error


def _started(receiver: WeightReceiver, text: str, group: dist.ProcessGroup | None) -> tuple[Manifest, int]:
    """What is coming, with the update started on every receiver. Collective over `group`.

    Raises:
        WeightSyncError: A receiver cannot take it; on all of them and on the sender, and nothing has been written.
    """
    announced: tuple[Manifest, int] | None = None
    error: Exception | None = None
    started = False
    try:
        announced = manifest_from_json(text)
        receiver.start(announced[0])
        started = True
    except Exception as found:  # noqa: BLE001 -- answered to all
        error = found
    failure = _first_failure(error, group)
    if failure is None:
        assert announced is not None  # this receiver has started it
        return announced
    if started and hasattr(receiver, "cancel"):
        receiver.cancel()
    elif started:
        receiver.abort(str(failure))
    raise failure from error


def _drain_into(
    receiver: WeightReceiver,
    manifest: Manifest,
    src: int,
    group: dist.ProcessGroup | None,
    on_bucket: Callable[[Bucket], None] | None,
    check: ReadBackCheck,
) -> Exception | None:
    """Take every bucket off the wire, and load it unless something failed. Collective over `group`."""
    buckets = manifest.buckets()
    ring = _Ring(buckets, wire_device(group))
    error: Exception | None = None
    good = True
    for index in range(min(_BUFFERS - 1, len(buckets))):
        ring.broadcast(index, buckets[index].nbytes, src, group)
    for index, bucket in enumerate(buckets):
        ahead = index + _BUFFERS - 1
        if ahead < len(buckets):
            ring.broadcast(ahead, buckets[ahead].nbytes, src, group)
        buffer = ring.buffer(index)
        if error is not None or not good:
            continue
        try:
            filled = _opened(buffer, bucket)
            good = filled is not None
            if filled is not None:
                _load(receiver, filled, check)
            if filled is not None and on_bucket is not None:
                on_bucket(bucket)
        except Exception as found:  # noqa: BLE001 -- answered at the end
            error = found
    return error


def _load(receiver: WeightReceiver, filled: Bucket, check: ReadBackCheck) -> None:
    pieces = {name: Piece(tensor, tensor.dtype) for name, tensor in filled}
    check.note(pieces)
    handle = receiver.load(filled)
    if handle is not None:
        handle.wait()  # the buffer is overwritten by the bucket after the next
    check.note_parts(pieces)
