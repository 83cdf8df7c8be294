"""What a receiver of weights must offer, and the state that every receiver keeps."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rft_sync.errors import EngineNotReady, UnknownTensor
from rft_sync.manifest import Manifest
from rft_sync.parameters import Bucket, ParamMeta
from rft_sync.scan import Piece


class LoadHandle(Protocol):
    """A load that goes on after `load` has returned."""

    def wait(self) -> object:
        """Return when the tensors of the bucket may be overwritten."""
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """The engine's side of an update, in the process of the trainer. One update: start, load..., finish or abort.

    None of the methods may be collective over the trainer's ranks unless every rank's receiver is of that kind. An
    error in any of them fails the update on every rank. A receiver that can be read back offers `ReadableReceiver` too.
    """

    def start(self, manifest: Manifest) -> None:
        """Check that the engine can take `manifest`, before anything is sent.

        Raises:
            EngineNotReady: Asleep, generating, gone, or inside an update.
            UnknownTensor: Names that the engine lacks, or needs and does not get.
            ShapeMismatch: Sizes that do not fit.
        """
        ...

    def load(self, bucket: Bucket) -> LoadHandle | None:
        """Copy `bucket` into the engine. Its tensors are good until this returns, or until the handle is done."""
        ...

    def finish(self, version: int) -> None:
        """Make the engine generate with the new weights: everything was loaded; reset caches. Sets the version."""
        ...

    def abort(self, reason: str) -> None:
        """The update failed after `start` succeeded here, or after `finish`, when verification failed.

        The engine's weights are undefined until a full update succeeds. A receiver may also have `cancel()`, which is
        called in place of `abort` when another rank refused in `start`, so that nothing was loaded anywhere.
        """
        ...


@runtime_checkable
class ReadableReceiver(Protocol):
    """A receiver whose weights can be read again, for verification."""

    def readable(self) -> Sequence[str]:
        """Names whose content can be read back on this rank."""
        ...

    def expected_parts(self, name: str, tensor: Tensor) -> Sequence[Piece]:
        """The pieces of the sent `tensor` that this rank's engine holds, each with the engine's dtype."""
        ...

    def read_back(self, name: str) -> Sequence[Tensor]:
        """The live pieces, in the order of `expected_parts`."""
        ...


@runtime_checkable
class LiveReceiver(Protocol):
    """A receiver that can copy straight from the trainer's live tensors, without buckets."""

    def takes_live(self, metadata: Sequence[ParamMeta], tensors: Mapping[str, Tensor]) -> bool:
        """Whether `load_live` would do for `tensors` what `load` does for their casts. Inside an update."""
        ...

    def load_live(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy and cast all tensors of the update into the engine: name -> live tensor, aliases left out."""
        ...


@runtime_checkable
class SharingReceiver(Protocol):
    """A receiver whose engine's memory a trainer may train in (`share_weights`)."""

    def sharing_refusal(self) -> str:
        """Why not; empty where it may."""
        ...

    def home(self, name: str, tensor: Tensor) -> Tensor | None:
        """The engine's memory for all of the sent tensor `name`, as a view of its shape; None where it has no such.

        Known after the first update.
        """
        ...


@runtime_checkable
class TypedReceiver(Protocol):
    """A receiver that knows the dtypes of its engine, so that the sender can cast before it gathers."""

    def dtype_policy(self) -> torch.dtype | Mapping[str, torch.dtype] | None:
        """Engine dtype of all floating-point weights, or by checkpoint name."""
        ...


class UpdateSession:
    """Where a receiver stands: idle, inside an update, or unusable. Kept by every receiver of this package.

    Attributes:
        version: Version of the last finished update; None before the first.
        usable: False from the start of an update until it is finished.
        reason: Why it is not usable.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._manifest: Manifest | None = None
        self._loaded: set[str] = set()
        self._before: tuple[bool, str, int | None] = (True, "", None)
        self.version: int | None = None
        self.usable = True
        self.reason = ""

    @property
    def manifest(self) -> Manifest | None:
        """What the open update carries."""
        return self._manifest

    def open(self, manifest: Manifest) -> None:
        """Begin an update.

        Raises:
            EngineNotReady: One is open already.
        """
        if self._manifest is not None:
            raise EngineNotReady(f"{self._owner} is inside an update; finish or abort it before starting another")
        self._manifest, self._loaded = manifest, set()
        self._before = (self.usable, self.reason, self.version)
        self.usable, self.reason = False, "an update is open"

    def count(self, names: Iterable[str]) -> None:
        """Note names that were loaded.

        Raises:
            EngineNotReady: No update is open.
            UnknownTensor: A name that the manifest does not list.
        """
        if self._manifest is None:
            raise EngineNotReady(f"{self._owner} got a bucket outside an update; call start(manifest) first")
        new = self._manifest.known if names is self._manifest.names else set(names)
        unknown = sorted(new - self._manifest.known)
        if unknown:
            raise UnknownTensor(f"{self._owner} got tensors that the manifest does not list: {unknown}", unknown)
        self._loaded.update(new)

    def check_complete(self) -> None:
        """All of the manifest was loaded.

        Raises:
            EngineNotReady: No update is open.
            UnknownTensor: Names that never came.
        """
        if self._manifest is None:
            raise EngineNotReady(f"{self._owner} has no open update to finish; call start(manifest) first")
        if len(self._loaded) < len(self._manifest.known):  # only names of the manifest are counted
            absent = [name for name in self._manifest.names if name not in self._loaded]
            raise UnknownTensor(
                f"{self._owner} was promised {len(self._manifest.names)} tensors and got {len(self._loaded)}; "
                f"absent: {absent}",
                absent,
            )

    @property
    def loaded(self) -> int:
        """Number of names loaded in the update that is open or was the last."""
        return len(self._loaded)

    def close(self, version: int) -> None:
        """The update is finished."""
        self._manifest = None
        self.version, self.usable, self.reason = version, True, ""

    def abort(self, reason: str) -> None:
        """The update failed, or a finished one did not stand verification: the version is what it was before."""
        self._manifest = None
        self.version = self._before[2]
        self.usable, self.reason = False, reason

    def cancel(self) -> None:
        """The update ended before anything was loaded: all is what it was before."""
        self._manifest = None
        self.usable, self.reason, self.version = self._before

    def require_full(self, manifest: Manifest) -> None:
        """An adapter cannot repair undefined base weights.

        Raises:
            EngineNotReady: The last update failed and this one carries an adapter only.
        """
        if not self.usable and self._manifest is None and manifest.kind != "full":
            raise EngineNotReady(
                f"{self._owner} holds undefined weights ({self.reason}); send the full weights before an adapter"
            )
