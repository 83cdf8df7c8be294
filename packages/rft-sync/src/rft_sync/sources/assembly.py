"""The machinery that all sources share: live tensors -> (adapters merged) -> checkpoint tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rft_sync.errors import ShapeMismatch, UnknownTensor, WeightSyncError
from rft_sync.gathering import BucketGatherer, GatherRequest
from rft_sync.live import LiveTensor, LiveTensors, check_sendable, same_memory
from rft_sync.naming import NameUnit, checkpoint_units, fp32_patterns, matches_any
from rft_sync.parameters import ParamMeta
from rft_sync.partition import Placement, Whole, placement_of

DtypePolicy = torch.dtype | Mapping[str, torch.dtype] | None
Combine = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """One tensor of the model without wrappers: read from `parts[0]`, or computed from all of `parts`."""

    name: str
    parts: tuple[LiveTensor, ...]
    combine: Combine | None = None
    """Takes the parts whole and in their own dtypes, returns a new tensor of the shape of the first."""

    @property
    def buffer(self) -> bool:
        """Whether it is a buffer."""
        return self.parts[0].buffer


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """What the gathers since the last `release` cost."""

    peak_extra_bytes: int
    cast_seconds: float
    casts: Mapping[tuple[torch.dtype, torch.dtype], int]
    skipped_buffers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    signature: tuple[object, ...]
    metadata: tuple[ParamMeta, ...]
    exports: Mapping[str, ExportTensor]
    placements: Mapping[str, tuple[Placement, ...]]
    """Export name -> where its parts were at the last `metadata`; the values are read when they are gathered."""
    unit_of: Mapping[str, NameUnit]
    dtype_of: Mapping[str, torch.dtype]
    """Export name -> dtype in which it is gathered or made."""
    original_of: Mapping[str, str]
    """Checkpoint name of an alias -> checkpoint name of its original."""


class CheckpointSource:
    """A `ParameterSource` over `exports`, a function that lists the model's tensors anew at every update.

    Args:
        model: The unwrapped model, whose library knows the checkpoint names.
        exports: Lists what is sent, and the non-persistent buffers that are not.
        dtype: Engine dtype for floating-point tensors: one for all, or by checkpoint name; None keeps the live dtype.
            Shards are cast before they are gathered.
        keep_fp32: Names (`*` allowed) that are never cast; the model's own list of that kind is added.
        trace: A value that differs whenever `exports` might list other tensors; None where only listing can tell.
        direct_bytes: Tensors of this size or more by-pass the wire buffer.
        wire_bytes: Largest wire buffer.

    Attributes:
        model: The unwrapped model.
    """

    kind = "full"

    def __init__(
        self,
        model: nn.Module,
        exports: Callable[[], tuple[Sequence[ExportTensor], Sequence[str]]],
        *,
        dtype: DtypePolicy = None,
        keep_fp32: Sequence[str] = (),
        trace: Callable[[], object] | None = None,
        direct_bytes: int = 1 << 20,
        wire_bytes: int = 1 << 28,
    ) -> None:
        self.model = model
        self._exports = exports
        self._trace = trace
        self._traced: object = None
        self._dtype = dtype
        self._keep_fp32 = tuple(keep_fp32)
        self._gatherer = BucketGatherer(direct_bytes=direct_bytes, wire_bytes=wire_bytes)
        self._plan: _Plan | None = None
        self._readers: list[tuple[str, Callable[[], Tensor]]] | None = None
        self._token: object = None
        self._skipped: tuple[str, ...] = ()
        self._open = False

    def metadata(self) -> tuple[ParamMeta, ...]:
        """Every tensor of the model as it is now, aliases behind their originals. No communication.

        The same object as last time where nothing changed.

        Raises:
            UnsupportedCombination: Meta, quantised or otherwise unreadable tensors, by name.
        """
        return self._current_plan().metadata

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """Whole tensors for `names`, valid inside the context. Collective over the groups that hold the shards.

        Values are the present ones; call `metadata` again after parameters were replaced.

        Raises:
            UnknownTensor: A name that `metadata` does not list.
            WeightSyncError: Another gather of this source is open.
        """
        plan = self._plan or self._current_plan()
        unknown = [name for name in names if name not in plan.unit_of]
        if unknown:
            raise UnknownTensor(f"no such tensors in the model: {unknown}; names come from metadata()", unknown)
        if self._open:
            raise WeightSyncError("a gather of this source is open; its buffers serve one at a time")
        self._open = True
        try:
            yield self._gathered(plan, names)
        finally:
            self._open = False

    def live(self) -> LiveTensors | None:
        """Name -> live tensor in its own dtype, aliases left out; None where a tensor must be gathered or computed.

        No communication. The tensors are the trainer's own and stay so until its next step.
        """
        plan = self._plan or self._current_plan()
        if self._readers is None:
            self._readers, self._token = _readers(plan), object()
        return LiveTensors(((name, read()) for name, read in self._readers), self._token) if self._readers else None

    def live_parameters(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        """Of `live()`, the parameters: name -> (parameter, its tensor on this rank). Empty where `live()` is None."""
        tensors = self.live()
        plan = self._plan
        if tensors is None or plan is None:
            return {}
        found: dict[str, tuple[nn.Parameter, Tensor]] = {}
        for name, tensor in tensors.items():
            export = plan.exports[plan.unit_of[name].live[0]]
            if isinstance(export.parts[0].tensor, nn.Parameter):
                found[name] = (export.parts[0].tensor, tensor)
        return found

    def release(self) -> None:
        """Give back the buffers of past gathers."""
        self._gatherer.release()

    def statistics(self) -> SourceStatistics:
        """Bytes, seconds and casts since `reset_statistics`."""
        gatherer = self._gatherer
        return SourceStatistics(gatherer.peak_bytes, gatherer.cast_seconds, dict(gatherer.casts), self._skipped)

    def reset_statistics(self) -> None:
        """Start new counts."""
        self._gatherer.reset_counters()

    def _gathered(self, plan: _Plan, names: Sequence[str]) -> dict[str, Tensor]:
        units = {id(unit): unit for name in names for unit in [plan.unit_of[plan.original_of.get(name, name)]]}
        wanted = [plan.exports[live] for unit in units.values() for live in unit.live]
        requests = [request for export in wanted for request in self._requests(plan, export)]
        with torch.no_grad():
            tensors = iter(self._gatherer.gather(requests))
            made = {export.name: self._made(plan, export, [next(tensors) for _ in export.parts]) for export in wanted}
            produced: dict[str, Tensor] = {}
            for unit in units.values():
                members = {live: made[live] for live in unit.live}
                if unit.convert is not None:
                    produced.update(unit.convert(members))
                else:
                    produced[unit.checkpoint[0]] = members[unit.live[0]]
        return {name: produced[plan.original_of.get(name, name)] for name in names}

    def _requests(self, plan: _Plan, export: ExportTensor) -> list[GatherRequest]:
        requests = []
        for part, placement in zip(export.parts, plan.placements[export.name], strict=True):
            # Parts of a merge keep their own precision: rounding the base first would round twice.
            dtype = plan.dtype_of[export.name] if export.combine is None else placement.dtype
            requests.append(GatherRequest(part.name, placement, dtype))
        return requests

    def _made(self, plan: _Plan, export: ExportTensor, parts: list[Tensor]) -> Tensor:
        return parts[0] if export.combine is None else export.combine(parts).to(plan.dtype_of[export.name])

    def _current_plan(self) -> _Plan:
        traced = self._trace() if self._trace is not None else None
        if self._plan is not None and traced is not None and traced == self._traced:
            return self._plan
        self._traced, self._readers = traced, None
        exports, skipped = self._exports()
        self._skipped = tuple(skipped)
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        placements: dict[str, tuple[Placement, ...]] = {}
        for export in exports:
            for part in export.parts:
                check_sendable(part.name, part.tensor, buffer=part.buffer)
            found = tuple(placement_of(part.name, part.tensor) for part in export.parts)
            placements[export.name] = found
            shapes[export.name], dtypes[export.name] = found[0].shape, found[0].dtype
        if len(shapes) != len(exports):
            raise ShapeMismatch("two tensors of the model have one name once wrapper prefixes are removed")
        ties = {export.name: export.combine is None and same_memory(export.parts[0].tensor) for export in exports}
        signature = (tuple(shapes.items()), tuple(dtypes.items()), _tie_pattern(ties))
        if self._plan is None or self._plan.signature != signature:
            self._plan = self._new_plan(signature, exports, placements, ties)
        else:
            by_name = {export.name: export for export in exports}
            self._plan = replace(self._plan, exports=by_name, placements=placements)
        return self._plan

    def _new_plan(
        self,
        signature: tuple[object, ...],
        exports: Sequence[ExportTensor],
        placements: Mapping[str, tuple[Placement, ...]],
        ties: Mapping[str, object],
    ) -> _Plan:
        shapes = {name: found[0].shape for name, found in placements.items()}
        dtypes = {name: found[0].dtype for name, found in placements.items()}
        by_name = {export.name: export for export in exports}
        units = checkpoint_units(self.model, shapes)
        first_of: dict[object, NameUnit] = {}
        metadata: list[ParamMeta] = []
        dtype_of: dict[str, torch.dtype] = {}
        original_of: dict[str, str] = {}
        for unit in units:
            tie = ties[unit.live[0]] if len(unit.live) == 1 else False
            twin = first_of.setdefault(tie, unit) if tie else unit
            dtype = self._send_dtype(unit, dtypes, twin)
            dtype_of.update(dict.fromkeys(unit.live, dtype))
            for index, (name, shape) in enumerate(zip(unit.checkpoint, unit.shapes, strict=True)):
                alias = None if twin is unit else twin.checkpoint[index]
                if alias is not None:
                    original_of[name] = alias
                buffer = by_name[unit.live[0]].buffer
                metadata.append(ParamMeta(name=name, shape=shape, dtype=dtype, buffer=buffer, alias_of=alias))
        unit_of = {name: unit for unit in units for name in unit.checkpoint}
        return _Plan(signature, tuple(metadata), by_name, placements, unit_of, dtype_of, original_of)

    def _send_dtype(self, unit: NameUnit, dtypes: Mapping[str, torch.dtype], twin: NameUnit) -> torch.dtype:
        live = dtypes[twin.live[0]]
        policy = self._dtype
        if isinstance(policy, Mapping):
            policy = policy.get(twin.checkpoint[0])
        if policy is None or not live.is_floating_point or not policy.is_floating_point:
            return live
        kept = self._keep_fp32 + fp32_patterns(self.model, policy)
        names = (*twin.live, *twin.checkpoint, *unit.live, *unit.checkpoint)
        if live is torch.float32 and any(matches_any(name, kept) for name in names):
            return live
        return policy


def _readers(plan: _Plan) -> list[tuple[str, Callable[[], Tensor]]]:
    """How each tensor that is sent is read where it lies; empty where one must be gathered or computed."""
    found: list[tuple[str, Callable[[], Tensor]]] = []
    for meta in plan.metadata:
        if meta.alias_of is not None:
            continue
        unit = plan.unit_of[meta.name]
        placement = plan.placements[unit.live[0]][0]
        if plan.exports[unit.live[0]].combine is not None or unit.convert is not None:
            return []
        if not isinstance(placement, Whole):
            return []
        found.append((meta.name, placement.read))
    return found


def _tie_pattern(ties: Mapping[str, object]) -> tuple[int, ...]:
    """Which names share memory, without the addresses."""
    seen: dict[object, int] = {}
    return tuple(index if not tie else seen.setdefault(tie, index) for index, tie in enumerate(ties.values()))
