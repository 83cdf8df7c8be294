"""Which owner is where in which phase, as data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from rft_trainer.strategy.residency import OPTIMIZER_SUFFIX

ENGINE = "engine"

_GENERATING = ("generate", "evaluate")
_TRAINING = ("update", "checkpoint")
# Phase -> frozen models that score in it; a reference made of the actor's own weights is no owner.
_SCORING: Mapping[str, str] = {"reference": "reference", "teacher": "teacher"}
PHASES = (
    "generate",
    "actor_log_probs",
    "reference",
    "teacher",
    "critic_values",
    "rewards",
    "advantages",
    "update",
    "sync",
    "record",
    "evaluate",
    "checkpoint",
)


class Placement(StrEnum):
    """What a phase asks of an owner."""

    DEVICE = "device"
    """Brought in before the phase."""
    HOST = "host"
    """Moved out before the phase; for the engine: asleep."""
    ANY = "any"
    """Left where it is."""


@dataclass(frozen=True)
class OwnerRow:
    """One owner's placement by phase; `otherwise` holds in a phase that the plan does not know."""

    phases: Mapping[str, Placement]
    otherwise: Placement


@dataclass(frozen=True)
class PlacementPlan:
    """Placement of each owner in each phase; an owner that is not listed is left where it is."""

    rows: Mapping[str, OwnerRow]

    def placement(self, owner: str, phase: str) -> Placement:
        """What `phase` asks of `owner`."""
        row = self.rows.get(owner)
        return Placement.ANY if row is None else row.phases.get(phase, row.otherwise)

    @property
    def owners(self) -> tuple[str, ...]:
        """Everything that is placed."""
        return tuple(self.rows)

    def table(self) -> str:
        """Phases down, owners across."""
        width = max(len(phase) for phase in PHASES)
        head = " " * width + "".join(f"  {owner:>18}" for owner in self.rows)
        lines = [
            f"{phase:<{width}}" + "".join(f"  {self.placement(owner, phase):>18}" for owner in self.rows)
            for phase in PHASES
        ]
        return "\n".join([head, *lines])


def plan_placement(
    *,
    trained: Sequence[str],
    frozen: Sequence[str],
    offload_trained: bool,
    offload_frozen: bool,
    optimizer_on_host: bool,
    engine_sleeps: bool,
    more_rounds: bool = False,
) -> PlacementPlan:
    """The plan of a run.

    Args:
        trained: names of trained models, such as actor and critic.
        frozen: names of models that are only scored.
        offload_trained: trained models and their optimisers leave while the engine generates.
        offload_frozen: a frozen model is on the device in its own phase only.
        optimizer_on_host: optimiser states are on the host except from an optimiser step to the end of the update.
        engine_sleeps: the engine gives its memory up outside generation; a sync wakes its weights by itself.
        more_rounds: scores may send a step back to generating, so the engine stays awake while responses are scored.
    """
    rows: dict[str, OwnerRow] = {}
    for name in trained:
        rows[name] = _row(lambda phase: _trained(phase, away=offload_trained), Placement.DEVICE)
        rows[name + OPTIMIZER_SUFFIX] = _row(
            lambda phase: _optimizer(phase, away=offload_trained, on_host=optimizer_on_host), Placement.ANY
        )
    for name in frozen:
        rows[name] = _row(partial(_frozen, name, away=offload_frozen), Placement.DEVICE)
    rows[ENGINE] = _row(lambda phase: _engine(phase, sleeps=engine_sleeps, stays=more_rounds), Placement.ANY)
    return PlacementPlan(rows)


def _row(rule: Callable[[str], Placement], otherwise: Placement) -> OwnerRow:
    return OwnerRow({phase: rule(phase) for phase in PHASES}, otherwise)


def _trained(phase: str, *, away: bool) -> Placement:
    if phase in _GENERATING and away:
        return Placement.HOST
    # Between a sync and the next rollout nothing needs to move.
    return Placement.ANY if phase in (*_GENERATING, "record", "rewards", "advantages") else Placement.DEVICE


def _optimizer(phase: str, *, away: bool, on_host: bool) -> Placement:
    if phase in _TRAINING:
        # The first optimiser step brings it in, after the activations of the backward passes are gone.
        return Placement.ANY if on_host else Placement.DEVICE
    if phase in _GENERATING and away:
        return Placement.HOST
    return Placement.HOST if on_host else Placement.ANY


def _frozen(name: str, phase: str, *, away: bool) -> Placement:
    if _SCORING.get(phase) == name:
        return Placement.DEVICE
    return Placement.HOST if away else Placement.ANY


def _engine(phase: str, *, sleeps: bool, stays: bool) -> Placement:
    if phase in _GENERATING or (stays and phase == "rewards"):
        return Placement.DEVICE
    # A sync wakes weights and nothing more; what follows it finds the engine half awake on purpose.
    return Placement.HOST if sleeps and phase not in ("sync", "record", "checkpoint") else Placement.ANY
