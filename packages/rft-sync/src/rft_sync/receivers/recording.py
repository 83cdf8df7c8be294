"""A receiver that keeps everything it is given: for tests, dry runs and writing a checkpoint."""

from collections.abc import Sequence

from torch import Tensor

from rft_sync.manifest import Manifest
from rft_sync.parameters import Bucket
from rft_sync.receivers.protocol import UpdateSession
from rft_sync.scan import Piece


class RecordingReceiver:
    """Keeps own copies of the tensors, and the calls in order.

    Attributes:
        tensors: Checkpoint name -> copy of the last tensor loaded under it. An alias shares the copy of its original.
        calls: `("start", digest)`, `("load", names)`, `("finish", version)`, `("abort", reason)`.
        session: Version and usability.
    """

    def __init__(self) -> None:
        self.session = UpdateSession("RecordingReceiver")
        self.tensors: dict[str, Tensor] = {}
        self.calls: list[tuple[str, object]] = []

    def start(self, manifest: Manifest) -> None:
        """Forget the tensors of the last update."""
        self.session.require_full(manifest)
        self.session.open(manifest)
        self.calls.append(("start", manifest.digest))
        self.tensors = {}

    def load(self, bucket: Bucket) -> None:
        """Clone the tensors of `bucket`."""
        self.session.count(bucket.names)
        self.calls.append(("load", bucket.names))
        for meta in bucket.metadata:
            if meta.alias_of is None:
                self.tensors[meta.name] = bucket.tensors[meta.name].detach().clone()
        for meta in bucket.metadata:
            if meta.alias_of is not None:
                self.tensors[meta.name] = self.tensors[meta.alias_of]

    def finish(self, version: int) -> None:
        """Check that everything came."""
        self.session.check_complete()
        self.session.close(version)
        self.calls.append(("finish", version))

    def cancel(self) -> None:
        """Nothing was loaded: be what it was before."""
        self.session.cancel()

    def abort(self, reason: str) -> None:
        """Mark as unusable."""
        self.session.abort(reason)
        self.calls.append(("abort", reason))

    def readable(self) -> Sequence[str]:
        """Everything."""
        return tuple(self.tensors)

    def expected_parts(self, name: str, tensor: Tensor) -> Sequence[Piece]:
        """The tensor itself."""
        return (Piece(tensor, tensor.dtype),)

    def read_back(self, name: str) -> Sequence[Tensor]:
        """The kept copy."""
        return (self.tensors[name],)
