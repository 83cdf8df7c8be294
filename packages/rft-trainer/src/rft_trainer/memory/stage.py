"""Carries a placement plan out at the border between two phases."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from rft_trainer.memory.plan import ENGINE, Placement, PlacementPlan
from rft_trainer.strategy.protocols import Movable, Move, TrainState


class SleepingRuntime(Protocol):
    """The part of a RolloutRuntime that a stage directs."""

    def sleep(self, *, update_follows: bool) -> bool:
        """Give the engine's memory up; whether it did, and did not sleep already."""

    def restore_weights(self, state: TrainState) -> None:
        """Send the weights again if they were dropped since the last update. May be collective over the world."""

    def wake(self) -> None:
        """Make the engine ready. No communication."""


class Stage:
    """Moves owners in and out when a phase begins: first what leaves, then what comes.

    What it does follows from where things are, not from what it did before, so a phase that failed needs no repair.

    Args:
        plan: who is where in which phase.
        owners: owner -> its memory.
        runtime: the engine's side.
        actor: whose weights the engine has.
        device: of this rank.
        full_updates: an update sends every weight, so that a sleep before it may drop them.
    """

    def __init__(
        self,
        plan: PlacementPlan,
        owners: Mapping[str, Movable],
        runtime: SleepingRuntime,
        actor: TrainState,
        device: torch.device,
        *,
        full_updates: bool,
    ) -> None:
        self._plan = plan
        self._owners = dict(owners)
        self._runtime = runtime
        self._actor = actor
        self._device = device
        self._full_updates = full_updates
        self._phase = "start"

    def enter(self, phase: str) -> bool:
        """Place every owner for `phase`; whether the engine went to sleep for it.

        Collective over the world where the engine's weights are sent again.
        """
        before, self._phase = self._phase, phase
        generates = self._wants(ENGINE, phase, Placement.DEVICE)
        if generates:
            self._runtime.restore_weights(self._actor)
        leaving = [memory for memory in self._placed(phase, Placement.HOST) if not memory.on_host]
        for memory in leaving:
            memory.offload()
        slept = False
        # A phase that leaves the engine as it is does so after a sync; one that is wide awake makes room.
        awake = not generates and self._wants(ENGINE, before, Placement.DEVICE)
        if awake or self._wants(ENGINE, phase, Placement.HOST):
            # A rollout and its rewards are followed by an update and a sync, an evaluation is not.
            follows = self._full_updates and before in ("generate", "rewards")
            slept = self._runtime.sleep(update_follows=follows)
        if leaving and self._device.type == "cuda":
            # Once for all of them: an engine's own allocator does not see torch's cache.
            torch.cuda.empty_cache()
        for memory in self._placed(phase, Placement.DEVICE):
            memory.reload()
        if generates:
            self._runtime.wake()
        return slept

    def take_moves(self) -> list[Move]:
        """The moves since the last call, all owners."""
        return [move for memory in self._owners.values() for move in memory.take_moves()]

    def _placed(self, phase: str, placement: Placement) -> list[Movable]:
        return [memory for owner, memory in self._owners.items() if self._wants(owner, phase, placement)]

    def _wants(self, owner: str, phase: str, placement: Placement) -> bool:
        return self._plan.placement(owner, phase) is placement


def move_metrics(moves: Sequence[Move]) -> dict[str, float]:
    """Seconds and GB/s (1e9 bytes) by direction under `memory/`, for moves that carried anything."""
    metrics: dict[str, float] = {}
    for direction in ("offload", "reload"):
        seconds = sum(move.seconds for move in moves if move.direction == direction and move.nbytes)
        nbytes = sum(move.nbytes for move in moves if move.direction == direction)
        if nbytes:
            metrics[f"memory/{direction}_seconds"] = seconds
            metrics[f"memory/{direction}_gigabytes_per_second"] = nbytes / seconds / 1e9
    return metrics
