"""One update from plan to report: the order of the steps, and what happens when one fails."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rft_sync.agreement import agree_on_digest, raise_together
from rft_sync.attendance import await_ranks
from rft_sync.errors import ManifestMismatch, NonFiniteWeight
from rft_sync.gate import EngineGate
from rft_sync.manifest import Manifest, Planned, Planner
from rft_sync.parameters import Bucket
from rft_sync.receivers.protocol import LiveReceiver, WeightReceiver
from rft_sync.report import SyncReport
from rft_sync.scan import LivePieces, Piece, Scanned, Scanner
from rft_sync.sources.protocol import ParameterSource
from rft_sync.verification import ReadBackCheck, Verification, rotating_sample

if TYPE_CHECKING:
    from rft_sync.manager import BroadcastConfig


def check_finite(names: Sequence[str], scanned: Scanned) -> None:
    """Refuse NaN and Inf.

    Args:
        names: Of the scanned pieces, in their order.
        scanned: A scan with `finite`.

    Raises:
        NonFiniteWeight: Lists the tensors.
    """
    wrong = [names[place] for place in scanned.nonfinite()]
    if wrong:
        raise NonFiniteWeight(
            f"NaN or Inf in {wrong}; the update is refused (check_finite=False sends them all the same)", wrong
        )


class Update:
    """One update. Collective over `group`; see `BroadcastManager.broadcast_to_engine`."""

    def __init__(
        self,
        source: ParameterSource,
        receiver: WeightReceiver,
        config: "BroadcastConfig",
        gate: EngineGate,
        group: dist.ProcessGroup | None,
        planner: Planner,
        scanner: Scanner,
    ) -> None:
        self._source = source
        self._receiver = receiver
        self._config = config
        self._gate = gate
        self._group = group
        self._planner = planner
        self._scanner = scanner
        self._seconds = dict.fromkeys(("wake", "gather", "cast", "load", "finish", "verify", "total"), 0.0)
        self._prepared = False
        self._started = False
        self._sending = False
        self._delivered = 0
        self._live_casts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def run(self, version: int, *, at_least: int, finished: int) -> SyncReport:
        """Plan, start, send, finish, verify; abort on every rank if any of it fails on one."""
        begin = time.perf_counter()
        _call(self._source, "reset_statistics")
        await_ranks("broadcast_to_engine", self._group, self._config.attendance_seconds)
        try:
            planned = self._agreed_plan(version, at_least)
            manifest = planned.manifest
            self._together(lambda: self._start(manifest))
            names = () if self._config.verify == "off" else planned.names
            sampled = (
                names if self._config.verify == "all" else rotating_sample(names, finished, self._config.verify_sample)
            )
            check = ReadBackCheck(self._receiver, sampled, self._scanner)
            live = self._live_tensors(planned)
            if live is not None:
                self._send_live(planned, live, check)
            else:
                self._sending = True
                self._send(planned, check)
            self._timed("finish", lambda: self._together(lambda: self._receiver.finish(version)))
            verification: list[Verification] = []
            self._together(lambda: verification.append(check.compare()))
            self._together(lambda: self._gate.finish(version))
        except BaseException as error:
            self._abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            _call(self._source, "release")
        self._seconds["verify"] = verification[0].seconds
        self._seconds["total"] = time.perf_counter() - begin
        return self._report(version, manifest, verification[0])

    def _agreed_plan(self, version: int, at_least: int) -> Planned:
        """What all ranks plan to send. Collective over the group."""
        planned: Planned | None = None
        error: Exception | None = None
        try:
            if isinstance(version, bool) or not isinstance(version, int):
                raise ManifestMismatch(f"version {version!r} is no count of updates; give a whole number, or None")
            if version < at_least:
                raise ManifestMismatch(
                    f"version {version} is older than the engine's {at_least}; versions never fall, give {at_least} to "
                    "send the same weights again"
                )
            planned = self._planner.plan(
                self._source.metadata(),
                bucket_bytes=self._config.bucket_bytes,
                groups=self._config.fused_groups,
                kind=getattr(self._source, "kind", "full"),
                adapter_config=_call(self._source, "adapter_config"),
            )
        except Exception as found:  # noqa: BLE001 -- raised on every rank by the agreement
            error = found
        digest = None if planned is None else f"{planned.digest}@{version}"
        agree_on_digest(digest, error, self._group)
        assert planned is not None
        return planned

    def _together(self, step: Callable[[], object]) -> None:
        """Do a local step, then raise its error on every rank. Collective over the group."""
        error: Exception | None = None
        try:
            step()
        except Exception as found:  # noqa: BLE001 -- raised on every rank by the agreement
            error = found
        raise_together(error, self._group)

    def _timed(self, phase: str, step: Callable[[], object]) -> None:
        begin = time.perf_counter()
        step()
        self._seconds[phase] += time.perf_counter() - begin

    def _start(self, manifest: Manifest) -> None:
        self._prepared = True
        self._timed("wake", lambda: self._gate.prepare(manifest.kind))
        self._receiver.start(manifest)
        self._started = True

    def _live_tensors(self, planned: Planned) -> Mapping[str, Tensor] | None:
        """The trainer's own tensors, where the receiver can copy all of them without buckets. No communication."""
        if not isinstance(self._receiver, LiveReceiver) or planned.manifest.kind != "full":
            return None
        tensors: Mapping[str, Tensor] | None = _call(self._source, "live")
        if tensors is None:
            return None
        return tensors if self._receiver.takes_live(planned.originals, tensors) else None

    def _send_live(self, planned: Planned, tensors: Mapping[str, Tensor], check: ReadBackCheck) -> None:
        """Check everything, then copy everything: a NaN on any rank is refused before any rank has written.

        Collective over the manager's group.
        """
        pieces = LivePieces(planned.by_name, tensors)
        token = getattr(tensors, "token", None)
        unmoved = None if token is None else (token, planned)
        self._together(lambda: self._note_live(pieces, check, unmoved))
        self._sending = True
        self._timed("load", lambda: self._together(lambda: self._receiver.load_live(tensors)))  # type: ignore[attr-defined]
        check.note_parts(pieces)
        self._delivered = len(pieces)
        for name, tensor in tensors.items():
            if tensor.dtype != (sent := planned.by_name[name].dtype):
                self._live_casts[tensor.dtype, sent] += 1

    def _note_live(self, pieces: LivePieces, check: ReadBackCheck, unmoved: object) -> None:
        scanned = None
        if self._config.check_finite:
            scanned = self._scanner.scan(pieces, finite=True, fingerprints=False, token=unmoved)
            check_finite(list(pieces), scanned)
        check.note(pieces, scanned)

    def _send(self, planned: Planned, check: ReadBackCheck) -> None:
        """Gather and load all buckets. Collective over the source's groups and the manager's group.

        A rank that fails goes on gathering, so that the others do not wait for it; all of them raise at the end.
        """
        error: Exception | None = None
        for bucket in planned.buckets:
            begin = time.perf_counter()
            try:
                with self._source.gather(bucket.names) as tensors:
                    self._seconds["gather"] += time.perf_counter() - begin
                    if error is None:
                        self._deliver(bucket.filled(tensors), check)
            except Exception as found:  # noqa: BLE001 -- raised on every rank below
                error = error or found
        raise_together(error, self._group)

    def _deliver(self, bucket: Bucket, check: ReadBackCheck) -> None:
        pieces = {meta.name: Piece(bucket.tensors[meta.name], meta.dtype) for meta in bucket.metadata}
        scanned = None
        if self._config.check_finite:
            scanned = self._scanner.scan(list(pieces.values()), finite=True, fingerprints=False)
            check_finite(list(pieces), scanned)
        check.note(pieces, scanned)
        begin = time.perf_counter()
        handle = self._receiver.load(bucket)
        if handle is not None:
            handle.wait()  # the bucket's memory is overwritten by the next gather
        self._seconds["load"] += time.perf_counter() - begin
        check.note_parts(pieces)
        self._delivered += len(bucket)

    def _abort(self, reason: str) -> None:
        """End the update here; where no rank has written anything, the engine is what it was before."""
        untouched = not self._sending and (not self._started or hasattr(self._receiver, "cancel"))
        if self._started and untouched:
            self._receiver.cancel()  # type: ignore[attr-defined]
        elif self._started:
            self._receiver.abort(reason)
        if self._prepared and untouched:
            self._gate.cancel(reason)
        elif self._prepared:
            self._gate.abort(reason)

    def _report(self, version: int, manifest: Manifest, verification: Verification) -> SyncReport:
        statistics = _call(self._source, "statistics")
        expected = self._expected_count() if manifest.kind == "full" else None
        cast = statistics.cast_seconds if statistics is not None else 0.0
        self._seconds["cast"] = cast
        self._seconds["gather"] = max(0.0, self._seconds["gather"] - cast)
        session = getattr(self._receiver, "session", None)
        casts = Counter(statistics.casts if statistics is not None else {}) + self._live_casts
        return SyncReport(
            version=version,
            tensors_sent=len(manifest.names),
            tensors_loaded=self._delivered if session is None else session.loaded,
            tensors_expected=len(manifest.names) if expected is None else expected,
            parameters=len(manifest.names) - manifest.aliases - manifest.buffer_count,
            buffers=manifest.buffer_count,
            aliases=manifest.aliases,
            skipped_buffers=len(statistics.skipped_buffers) if statistics is not None else 0,
            nbytes=manifest.nbytes,
            seconds=dict(self._seconds),
            gigabytes_per_second=manifest.nbytes / 1e9 / max(self._seconds["total"], 1e-9),
            peak_extra_bytes=statistics.peak_extra_bytes if statistics is not None else 0,
            fingerprint=verification.fingerprint,
            tensors_verified=len(verification.names),
            casts={f"{_short(a)}->{_short(b)}": count for (a, b), count in casts.items()},
        )

    def _expected_count(self) -> int | None:
        if hasattr(self._receiver, "expected_count"):
            return int(self._receiver.expected_count())
        expected = _call(self._receiver, "expected")
        return None if expected is None else len(expected)


def _call(target: object, method: str) -> Any:
    """Call an optional method; None where the object lacks it."""
    found = getattr(target, method, None)
    return found() if callable(found) else None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
