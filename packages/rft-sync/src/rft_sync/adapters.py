"""Updates of a LoRA model that send the adapter alone."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rft_sync.agreement import any_rank, raise_together
from rft_sync.attendance import await_ranks
from rft_sync.errors import UnsupportedCombination
from rft_sync.gate import EngineGate
from rft_sync.manager import BroadcastConfig, BroadcastManager
from rft_sync.receivers.protocol import TypedReceiver, WeightReceiver
from rft_sync.receivers.selection import connected_receiver
from rft_sync.report import SyncReport
from rft_sync.sources.lora import AdapterSource, BaseWeightsSource


class AdapterBroadcastManager(BroadcastManager):
    """Sends the adapter of a LoRA model; the weights below it go once, and again only when the engine has lost them.

    An engine loses them in a sleep that drops weights and in an update that failed. Base weights and adapter then
    arrive in one update session: there is no moment in which the engine would generate with one without the other.

    Args:
        model: A PEFT LoRA model as the trainer holds it, wrappers included.
        receiver: Of an engine that applies adapters.
        config: Bucket size, verification, checks; `share_weights` is refused.
        group: Ranks that update together and fail together; the default group if None.
        engine: An engine object whose state and update session are kept in step.
        keep_fp32: Names of base weights that are never cast.

    Raises:
        UnsupportedCombination: The model has no adapter that can be sent alone, or `share_weights` is set.
    """

    def __init__(
        self,
        model: nn.Module,
        receiver: WeightReceiver,
        config: BroadcastConfig | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        engine: Any = None,
        keep_fp32: Iterable[str] = (),
    ) -> None:
        if config is not None and config.share_weights:
            raise UnsupportedCombination(
                "share_weights and adapter-only sync: the trained adapter is not in the engine's weights; leave one out"
            )
        dtype = receiver.dtype_policy() if isinstance(receiver, TypedReceiver) else None
        factors = dtype if isinstance(dtype, torch.dtype) else None
        super().__init__(AdapterSource(model, dtype=factors), receiver, config, group=group, engine=engine)
        below = BaseWeightsSource(model, dtype=dtype, keep_fp32=tuple(keep_fp32))
        self._base = BroadcastManager(below, receiver, config, group=group, engine=engine)

    @classmethod
    def connect(
        cls,
        model: nn.Module,
        engine: Any,
        config: BroadcastConfig | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        keep_fp32: Iterable[str] = (),
    ) -> "AdapterBroadcastManager":
        """A manager for `model` and `engine`; arguments and errors as `BroadcastManager.connect`. No communication."""
        receiver, owner = connected_receiver(engine)
        return cls(model, receiver, config, group=group, engine=owner, keep_fp32=keep_fp32)

    def broadcast_to_engine(self, version: int | None = None) -> SyncReport:
        """Send the adapter, behind the base weights where the engine lacks them. Collective over the manager's group.

        Args:
            version: As in `BroadcastManager.broadcast_to_engine`.

        Returns:
            What the adapter's part sent and cost; the base weights' part is in the log.

        Raises:
            ManifestMismatch: A rank of the group did not make this call; on those that did.
            WeightSyncError: The same error on every rank; the next call sends the base weights again.
        """
        await_ranks("broadcast_to_engine", self._group, self.config.attendance_seconds)
        gate = EngineGate(self._engine, self.receiver, wake=self.config.on_asleep == "wake")
        if not any_rank(self._lacks_base(gate), self._group):
            return super().broadcast_to_engine(version)
        error: Exception | None = None
        try:
            gate.prepare("full")
        except Exception as found:  # noqa: BLE001 -- raised on every rank below
            error = found
        try:
            raise_together(error, self._group)
            self._base.broadcast_to_engine(self.version)
            report = super().broadcast_to_engine(version)
            gate.finish(self.version)
        except BaseException as failure:
            gate.abort(f"{type(failure).__name__}: {failure}")
            raise
        return report

    def _lacks_base(self, gate: EngineGate) -> bool:
        session = getattr(self.receiver, "session", None)
        unusable = session is not None and not session.usable
        return self._base.finished == 0 or unusable or gate.weights_undefined
