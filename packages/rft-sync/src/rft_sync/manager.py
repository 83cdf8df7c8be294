"""One call that brings an engine to the trainer's weights."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from rft_sync.attendance import DEFAULT_SECONDS
from rft_sync.gate import EngineGate
from rft_sync.manifest import Planner
from rft_sync.receivers.protocol import TypedReceiver, WeightReceiver
from rft_sync.receivers.selection import connected_receiver
from rft_sync.report import SyncReport
from rft_sync.scan import Scanner
from rft_sync.sharing import check_sharing, share_weights, shared_tensors
from rft_sync.sources.protocol import ParameterSource
from rft_sync.sources.selection import source_for
from rft_sync.update import Update

logger = logging.getLogger("rft_sync")


@dataclass(frozen=True, kw_only=True, slots=True)
class BroadcastConfig:
    """How weights are sent.

    Raises:
        ValueError: A field out of its range.
    """

    bucket_bytes: int = 1 << 28
    """Size of one bucket. Extra memory is about two buckets, or one oversize tensor or fused group and its copy."""
    verify: Literal["rotating", "all", "off"] = "rotating"
    """Read the engine back: everything at the first update and at the first one after a failure, else `verify_sample`
    tensors; everything; nothing."""
    verify_sample: int = 16
    check_finite: bool = True
    """Refuse NaN and Inf, naming the tensor."""
    on_asleep: Literal["refuse", "wake"] = "refuse"
    """A sleeping engine is an error, or its weights are woken."""
    fused_groups: tuple[tuple[str, ...], ...] = ()
    """Names that the engine fuses beyond q+k+v, gate+up and experts."""
    share_weights: bool = False
    """After the first update the trainer's parameters become views of the engine's memory: later updates copy nothing.
    Refused, with every reason, where dtype, layout, world or the engine do not allow it."""

    attendance_seconds: float = DEFAULT_SECONDS
    """How long a rank waits for the others to make the same call, before it names those that did not come."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"BroadcastConfig.bucket_bytes is {self.bucket_bytes}; give bytes, for example 2**28")
        if self.verify not in ("rotating", "all", "off"):
            raise ValueError(f"BroadcastConfig.verify is {self.verify!r}; use 'rotating', 'all' or 'off'")
        if self.verify_sample < 1:
            raise ValueError(f"BroadcastConfig.verify_sample is {self.verify_sample}; use 1 or more, or verify='off'")
        if self.on_asleep not in ("refuse", "wake"):
            raise ValueError(f"BroadcastConfig.on_asleep is {self.on_asleep!r}; use 'refuse' or 'wake'")
        if not self.attendance_seconds > 0:
            raise ValueError(f"BroadcastConfig.attendance_seconds is {self.attendance_seconds}; give seconds above 0")


class BroadcastManager:
    """Sends the weights of `source` into `receiver`, every rank into the engine of its own process.

    Args:
        source: Training weights.
        receiver: The engine's side.
        config: Bucket size, verification, checks.
        group: Ranks that update together and fail together; the default group if None. One process needs none.
        engine: An engine object whose state and update session are kept in step (see `EngineGate`).

    Attributes:
        version: Version of the last finished update; 0 before the first.

    Raises:
        UnsupportedCombination: `share_weights` is set and cannot be; the message lists every reason.
    """

    def __init__(
        self,
        source: ParameterSource,
        receiver: WeightReceiver,
        config: BroadcastConfig | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        engine: Any = None,
    ) -> None:
        self.source = source
        self.receiver = receiver
        self.config = config or BroadcastConfig()
        self.version = 0
        self._group = group
        self._engine = engine
        self._finished = 0
        self._planner = Planner()
        self._scanner = Scanner()
        if self.config.share_weights:
            check_sharing(source, receiver)

    @classmethod
    def connect(
        cls,
        model: nn.Module,
        engine: Any,
        config: BroadcastConfig | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        keep_fp32: Iterable[str] = (),
    ) -> "BroadcastManager":
        """A manager for `model` and `engine`, with the engine's dtype. No communication.

        Args:
            model: The training model, wrappers included (see `source_for`).
            engine: A raw engine or torch module (see `receiver_for`), or an object that holds one as `.native`.
            config: Bucket size, verification, checks.
            group: Ranks that update together; the default group if None.
            keep_fp32: Names never cast.

        Raises:
            UnsupportedCombination: The model or the engine cannot be served.
            EngineNotReady: The engine is gone.
        """
        receiver, owner = connected_receiver(engine)
        dtype = receiver.dtype_policy() if isinstance(receiver, TypedReceiver) else None
        source = source_for(model, dtype=dtype, keep_fp32=tuple(keep_fp32))
        return cls(source, receiver, config, group=group, engine=owner)

    @property
    def finished(self) -> int:
        """Updates that succeeded."""
        return self._finished

    def broadcast_to_engine(self, version: int | None = None) -> SyncReport:
        """Send everything, verify it, and raise the version. Collective over the manager's group.

        Args:
            version: Version that the engine shall have: the present one (a re-send) or a later one; by default the
                next one.

        Returns:
            What was sent and what it cost.

        Raises:
            ManifestMismatch: A rank of the group did not make this call; on those that did.
            WeightSyncError: The same error on every rank; the receivers are unusable until a full update succeeds
                (unless nothing had been written yet), and the version is what it was.
        """
        gate = EngineGate(self._engine, self.receiver, wake=self.config.on_asleep == "wake")
        update = Update(
            self.source, self.receiver, self.config, gate, self._group, planner=self._planner, scanner=self._scanner
        )
        wanted = self.version + 1 if version is None else version
        finished, self._finished = self._finished, 0  # after a failure everything is verified again
        report = update.run(wanted, at_least=self.version, finished=finished)
        self.version = wanted
        self._finished = finished + 1
        if self.config.share_weights and not shared_tensors(self.source, self.receiver):  # type: ignore[arg-type]
            share_weights(self.source, self.receiver)  # type: ignore[arg-type]
        logger.info("%s", report)
        if self._finished == 1 and not report.tensors_verified and self.config.verify != "off":
            logger.warning(
                "none of the %d tensors could be read back through %s, so nothing was verified; compare the engine's "
                "log-probabilities with the trainer's", report.tensors_sent, type(self.receiver).__name__,
            )  # fmt: skip
        return report
