"""A plain torch module as the engine: the embedded engine, a reference model, an averaged copy."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from rft_sync.errors import (
    EngineNotReady,
    IncompleteGroup,
    ManifestMismatch,
    ShapeMismatch,
    UnknownTensor,
    UnsupportedCombination,
)
from rft_sync.fusion import fused_groups
from rft_sync.live import tensor_trace
from rft_sync.manifest import Manifest
from rft_sync.parameters import Bucket, ParamMeta
from rft_sync.receivers.destination import Destination, destinations, tied_names
from rft_sync.receivers.layer_adapter import LayerAdapter
from rft_sync.receivers.protocol import UpdateSession
from rft_sync.receivers.replay import LiveCopies, Replay
from rft_sync.scan import Piece


class ModuleReceiver:
    """Writes into the parameters and persistent buffers of `module`, in place and in the module's own dtypes.

    The module may be wrapped, tied, or of another dtype than the trainer's; stacked experts are written through
    views. Parameter identity is kept, so compiled code and CUDA graphs stay good. An adapter is applied by hooks behind
    the linear layers that it adapts, until full weights come.

    Args:
        module: The engine's module; this process holds it whole.
        rename: Checkpoint name as sent -> checkpoint name as the module has it (see `PrefixMap`).
        pad_vocabulary: Accept tensors with fewer rows than the module's; the rows beyond are set to zero.

    Attributes:
        session: Version and usability.
    """

    def __init__(
        self, module: nn.Module, *, rename: Callable[[str], str] | None = None, pad_vocabulary: bool = False
    ) -> None:
        self._module: nn.Module | None = module
        self._rename = rename or str
        self._pad_vocabulary = pad_vocabulary
        self._places = destinations(module)
        self._trace: object = tensor_trace(module)
        self._checked: Manifest | None = None
        self._sent: dict[str, tuple[int, ...]] = {}
        self._copies = LiveCopies()
        self._copied: tuple[object, object] = (None, None)
        self._written: tuple[int, ...] = ()
        self._adapter = LayerAdapter(module)
        self.session = UpdateSession(f"ModuleReceiver({type(module).__name__})")

    def expected(self) -> tuple[ParamMeta, ...]:
        """What a full update must bring, in the module's own checkpoint names, shapes and dtypes."""
        ties = tied_names(self._places)
        return tuple(
            ParamMeta(
                name=name,
                shape=place.shape,
                dtype=place.live.tensor.dtype,
                buffer=place.live.buffer,
                alias_of=ties.get(name),
            )
            for name, place in self._places.items()
        )

    def expected_count(self) -> int:
        """How many tensors a full update must bring, ties included."""
        return len(self._places)

    def dtype_policy(self) -> Mapping[str, torch.dtype] | None:
        """The module's dtype by name; None under `rename`, where the sender cannot know the names."""
        if self._rename is not str:
            return None
        return {name: place.live.tensor.dtype for name, place in self._places.items()}

    def close(self) -> None:
        """Let the module go; later updates are refused."""
        self._module = None
        self._places = {}
        self._copies.forget()
        self._adapter.drop()

    def start(self, manifest: Manifest) -> None:
        """Compare `manifest` with the module.

        Raises:
            EngineNotReady: Closed, or inside an update.
            UnknownTensor: Names that only one side has.
            IncompleteGroup: A fused group that comes in part.
            ShapeMismatch: Sizes, or integer against floating point.
            ManifestMismatch: The module ties two tensors that are sent as different ones.
            UnsupportedCombination: An adapter that cannot be applied behind linear layers.
        """
        if self._module is None:
            raise EngineNotReady("the receiving module is gone (closed); connect a new one")
        self.session.require_full(manifest)
        if manifest.kind == "adapter":
            self._start_adapter(manifest)
            return
        trace = tensor_trace(self._module)
        if trace != self._trace:  # nothing of an earlier layout is remembered
            self._places, self._trace, self._checked = destinations(self._module), trace, None
        if manifest is not self._checked:
            self._check_names(manifest)
            for meta in manifest.metadata:
                self._check_fit(meta, self._places[self._rename(meta.name)])
        self.session.open(manifest)
        self._checked = manifest
        self._sent = {meta.name: meta.shape for meta in manifest.metadata}

    def _start_adapter(self, manifest: Manifest) -> None:
        if self._rename is not str:
            raise UnsupportedCombination("rename and adapter-only sync: the adapter's names are those of its layers")
        self._adapter.check(manifest)
        self.session.open(manifest)
        self._sent = {meta.name: meta.shape for meta in manifest.metadata}

    def _check_names(self, manifest: Manifest) -> None:
        sent = {self._rename(name): name for name in manifest.names}
        unknown = sorted(name for renamed, name in sent.items() if renamed not in self._places)
        if unknown:
            raise UnknownTensor(f"the receiving module has no {unknown}; it has {len(self._places)} others", unknown)
        ties = tied_names(self._places)
        absent = sorted(name for name in self._places if name not in sent and ties.get(name) not in sent)
        absent = [name for name in absent if not any(ties.get(other) == name for other in sent)]
        for group in fused_groups(self._places):
            parts = [name for name in group if name in absent]
            if parts and len(parts) < len(group):
                raise IncompleteGroup(
                    f"fused group {group} is sent without {parts}; send it whole or not at all", parts
                )
        if absent:
            raise UnknownTensor(f"the receiving module needs {absent}, which the source does not send", absent)
        alias_of = {self._rename(meta.name): meta.alias_of for meta in manifest.metadata}
        for name, original in ties.items():
            if name in sent and original in sent and alias_of[name] is None and alias_of[original] is None:
                raise ManifestMismatch(
                    f"the receiving module ties {name} to {original}, the source sends them as two tensors; untie the "
                    "module or tie the trainer's model",
                    [name, original],
                )

    def _check_fit(self, meta: ParamMeta, place: Destination) -> None:
        rows_only = meta.shape[1:] == place.shape[1:] and 0 < len(meta.shape) == len(place.shape)
        padded = self._pad_vocabulary and rows_only and meta.shape[0] < place.shape[0]
        if meta.shape != place.shape and not padded:
            hint = (
                "; pad_vocabulary=True zeroes the rows beyond" if rows_only and meta.shape[0] < place.shape[0] else ""
            )
            raise ShapeMismatch(
                f"{meta.name} is {meta.shape} at the source and {place.shape} in the receiving module{hint}",
                [meta.name],
            )
        target = place.live.tensor.dtype
        if meta.dtype.is_floating_point != target.is_floating_point:
            raise ShapeMismatch(f"{meta.name} is {meta.dtype} at the source and {target} in the module", [meta.name])

    @torch.no_grad()
    def load(self, bucket: Bucket) -> None:
        """Copy the bucket into the module."""
        self.session.count(bucket.names)
        if self._takes_adapter:
            self._adapter.load(bucket)
            return
        for name, tensor in bucket:
            target = self._places[self._rename(name)].view()
            if target.shape != tensor.shape:
                target[tensor.shape[0] :].zero_()
                target = target[: tensor.shape[0]]
            target.copy_(tensor)

    @property
    def _takes_adapter(self) -> bool:
        manifest = self.session.manifest
        return manifest is not None and manifest.kind == "adapter"

    def takes_live(self, metadata: Sequence[ParamMeta], tensors: Mapping[str, Tensor]) -> bool:
        """Whether all is on the module's device and rounded once on its way; not in a subclass with its own `load`."""
        if type(self).load is not ModuleReceiver.load:
            return False
        if self._repeats(tensors):
            return True
        for meta in metadata:
            target = self._places[self._rename(meta.name)].live.tensor
            tensor = tensors[meta.name]
            if tensor.device != target.device or meta.dtype not in (target.dtype, tensor.dtype):
                return False
        return True

    def _repeats(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether this is the last update again: the same manifest, nothing has moved on either side."""
        trace, manifest = self._copied
        unchanged = trace is self._trace and manifest is self.session.manifest
        return unchanged and self._copies.repeats(tensors)

    def load_live(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the trainer's tensors into the module, from a CUDA graph on a card."""
        manifest = self.session.manifest
        assert manifest is not None  # the update has been started
        if self._repeats(tensors):
            self._copies.run(tensors, list)
        else:
            self._record_live(manifest, tensors)
            self._copied = self._trace, manifest
        self.session.count(manifest.names)

    def _record_live(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        targets = {meta.name: self._places[self._rename(meta.name)].view() for meta in manifest.metadata}
        addresses = tuple(target.data_ptr() for target in targets.values())
        if addresses != self._written:
            self._copies.forget()
            self._written = addresses
        whole = {meta.name: tensors[meta.alias_of or meta.name] for meta in manifest.metadata}
        rows = {
            name: (target, whole[name].shape[0])
            for name, target in targets.items()
            if target.shape != whole[name].shape
        }
        self._copies.run(
            tensors,
            lambda: [
                (whole[name], target[: rows[name][1]] if name in rows else target) for name, target in targets.items()
            ],
            [target[count:] for target, count in rows.values()],
        )

    @property
    def replay(self) -> Replay | None:
        """The copies of the last update from live tensors; None before the first."""
        return self._copies.replay

    def sharing_refusal(self) -> str:
        """A module can always be trained in."""
        return ""

    def home(self, name: str, tensor: Tensor) -> Tensor | None:
        """The module's memory for `tensor`."""
        target = self._places[self._rename(name)].view()
        return target if target.shape == tensor.shape else None

    def finish(self, version: int) -> None:
        """Check that everything came; full weights end the life of an adapter."""
        self.session.check_complete()
        if self._takes_adapter:
            self._adapter.apply()
        else:
            self._adapter.drop()
        self.session.close(version)

    def cancel(self) -> None:
        """Nothing was loaded: be what it was before."""
        self.session.cancel()

    def abort(self, reason: str) -> None:
        """Mark as unusable until a full update succeeds."""
        self.session.abort(reason)

    def readable(self) -> Sequence[str]:
        """The names of the last update."""
        return tuple(self._sent)

    def expected_parts(self, name: str, tensor: Tensor) -> Sequence[Piece]:
        """The tensor in the module's dtype."""
        if name in self._adapter.factors:
            return (Piece(tensor, self._adapter.factors[name].dtype),)
        return (Piece(tensor, self._places[self._rename(name)].live.tensor.dtype),)

    def read_back(self, name: str) -> Sequence[Tensor]:
        """The rows of the live tensor that were sent."""
        if name in self._adapter.factors:
            return (self._adapter.factors[name],)
        live = self._places[self._rename(name)].view()
        return (live if tuple(live.shape) == self._sent[name] else live[: self._sent[name][0]],)
