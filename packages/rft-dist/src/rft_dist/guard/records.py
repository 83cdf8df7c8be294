"""What each rank shows the others about itself, and what can be concluded from it: data and pure functions."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Self


class RankState(StrEnum):
    """What a rank is doing.

    RUNNING: anything but waiting in the guard.
    WAITING: it has come to a collective and waits for the other members.
    LEFT: it has left the guard and will come to no further collective.
    FAILED: it has left the guard because of an exception.
    """

    RUNNING = "running"
    WAITING = "waiting"
    LEFT = "left"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank as it last showed itself.

    Attributes:
        beat: grows about once a second while the process runs.
        calls: collectives that it has come to, all groups together.
        state: what it is doing.
        ranks: members of the group of its last call; empty before the first.
        sequence: number of that call among those with the same members.
        call: that call in words.
        met: number of the last call that it has come to, for each group that it has called with (members as text).
        error: the exception of a rank that has failed.
    """

    beat: int = 0
    calls: int = 0
    state: RankState = RankState.RUNNING
    ranks: tuple[int, ...] = ()
    sequence: int = 0
    call: str = ""
    met: Mapping[str, int] = field(default_factory=dict)
    error: str = ""

    def to_json(self) -> str:
        """The record as it lies in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "state": RankState(fields["state"]), "ranks": tuple(fields["ranks"])})

    def same_stop(self, other: Self) -> bool:
        """Whether both records show the rank at the same point, only at different times."""
        return (self.calls, self.state) == (other.calls, other.state)


class Pulse:
    """Since when each rank has shown nothing new, by this process's clock."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}

    def observe(self, records: Mapping[int, RankRecord], at_seconds: float) -> None:
        """Notes what the records show at a time."""
        for rank, record in records.items():
            if self._seen.get(rank, (-1, 0.0))[0] != record.beat:
                self._seen[rank] = (record.beat, at_seconds)

    def silent(self, ranks: Iterable[int], at_seconds: float, for_seconds: float) -> tuple[int, ...]:
        """Those ranks whose last beat was seen longer ago than that."""
        return tuple(rank for rank in ranks if rank in self._seen and at_seconds - self._seen[rank][1] > for_seconds)


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """Why a waiting rank will wait for ever, or whom it waits for.

    Attributes:
        kind: "ended" (a member has left), "deadlock" (ranks wait for each other in different collectives) or
            "running" (a member has not come yet, which may be well).
        ranks: the ranks that are the reason.
    """

    kind: str
    ranks: tuple[int, ...]


def find_obstacle(rank: int, records: Mapping[int, RankRecord]) -> Obstacle | None:
    """Follows who waits for whom, from a waiting rank on.

    A rank waits for every member of its call's group that is not waiting in that same call. A member that has ended,
    or a circle of ranks, can never be waited out. A rank that seems to wait in a call which another member has passed
    counts as running: it died, stopped or went on since it showed that.

    Args:
        rank: where to start.
        records: of every rank that could be met on the way; a rank without a record counts as running.

    Returns:
        The worst obstacle that can be reached (ended, then deadlock, then running), None if all members have come.
    """
    records = {shown: _up_to_date(record, records) for shown, record in records.items()}
    found: list[Obstacle] = []
    finished: set[int] = set()

    def follow(current: int, path: tuple[int, ...]) -> None:
        record = records.get(current, RankRecord())
        if record.state in (RankState.LEFT, RankState.FAILED):
            found.append(Obstacle(kind="ended", ranks=(current,)))
        elif record.state is RankState.RUNNING:
            found.append(Obstacle(kind="running", ranks=(current,)))
        elif current in path:
            found.append(Obstacle(kind="deadlock", ranks=tuple(sorted(path[path.index(current) :]))))
        elif current not in finished:
            for member in record.ranks:
                if member != current and not _same_call(record, records.get(member)):
                    follow(member, (*path, current))
            finished.add(current)

    follow(rank, ())
    order = ("ended", "deadlock", "running")
    return min(found, key=lambda obstacle: order.index(obstacle.kind), default=None)


def _up_to_date(record: RankRecord, records: Mapping[int, RankRecord]) -> RankRecord:
    passed = record.state is RankState.WAITING and any(
        _has_passed(records[member], record) for member in record.ranks if member in records
    )
    return replace(record, state=RankState.RUNNING) if passed else record


def _has_passed(other: RankRecord, record: RankRecord) -> bool:
    """Whether the other rank has come out of the call in which the record waits, so that all members had come to it."""
    met = other.met.get(members_key(record.ranks), 0)
    inside = other.state is RankState.FAILED or _same_call(record, other)
    return met > record.sequence or (met == record.sequence and not inside)


def members_key(ranks: Iterable[int]) -> str:
    """The members of a group as text."""
    return ",".join(map(str, ranks))


def _same_call(record: RankRecord, other: RankRecord | None) -> bool:
    return (
        other is not None
        and other.state is RankState.WAITING
        and (other.ranks, other.sequence) == (record.ranks, record.sequence)
    )


def first_different(fingerprints: Mapping[int, object]) -> int:
    """The lowest rank whose call is not the common one; the lowest rank's is common where none has a majority."""
    counts = Counter(fingerprints[rank] for rank in sorted(fingerprints))
    common = counts.most_common(1)[0][0]
    return next(rank for rank in sorted(fingerprints) if fingerprints[rank] != common)


def mismatch_text(calls: Mapping[int, str], fingerprints: Mapping[int, object]) -> str:
    """Names the first rank that differs, what it called and where, and what the others called."""
    odd = first_different(fingerprints)
    others: dict[str, list[int]] = {}
    for rank in sorted(calls):
        if rank != odd:
            others.setdefault(calls[rank], []).append(rank)
    lines = [f"rank {odd} differs: it called {calls[odd]}"]
    lines += [f"rank {', '.join(map(str, ranks))} called {call}" for call, ranks in others.items()]
    return "; ".join(lines) + "; make all ranks of a group call the same collectives in the same order"
