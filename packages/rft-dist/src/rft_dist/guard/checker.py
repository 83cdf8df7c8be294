"""Comparing a call with the other ranks' calls, and finding out why one of them does not come."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store

from rft_dist.guard.board import Board, Verdict, wait_for
from rft_dist.guard.calls import CollectiveCall
from rft_dist.guard.channel import BrokenConnection, Channel
from rft_dist.guard.records import Obstacle, Pulse, RankRecord, RankState, find_obstacle, members_key, mismatch_text

# How long a comparison may take before the other ranks' records are looked at, and between two looks.
_PATIENCE_SECONDS = 1.0
# A rank that has shown no beat for so long after a connection broke is called dead.
_SILENCE_SECONDS = 4.0
# A broken connection without a silent rank: after so long the transport's own words must do.
_BROKEN_SECONDS = 15.0
_GLANCE_SECONDS = 0.2


class Checker:
    """One rank's part in the checks: the board, and a channel for each set of ranks that has met."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._world = range(world_size)
        self._timeout_seconds = timeout_seconds
        self._board = Board(PrefixStore("board", store), rank)
        self._channels: dict[tuple[int, ...], Channel] = {}
        self._sequences: Counter[tuple[int, ...]] = Counter()
        self._locks: dict[tuple[int, ...], threading.Lock] = {}
        self._verdict: Verdict | None = None

    def check(
        self, op: str, group: str, ranks: tuple[int, ...], signature: str, detail: str, tag: str, site: str
    ) -> None:
        """Returns when all members are about to make the same call. Collective over the ranks.

        Raises:
            CollectiveMismatchError: they are not, or a member has left; the same error on every rank.
            RankUnresponsiveError: a member died or did not come in time; the same error on every rank.
        """
        if self._verdict is not None:
            self._verdict.throw()
        if len(ranks) == 1:
            return
        with self._locks.setdefault(ranks, threading.Lock()):
            self._sequences[ranks] += 1
            call = CollectiveCall(
                op=op,
                signature=signature,
                detail=detail,
                group=group,
                ranks=ranks,
                sequence=self._sequences[ranks],
                tag=tag,
                site=site,
            )
            self._board.update(
                calls=self._board.record.calls + 1,
                state=RankState.WAITING,
                ranks=ranks,
                sequence=call.sequence,
                call=str(call),
                met={members_key(members): sequence for members, sequence in self._sequences.items()},
            )
            verdict = self._judged(call)
            if verdict is not None:
                self._verdict = verdict
                verdict.throw()
            self._board.update(state=RankState.RUNNING)

    def close(self, error: BaseException | None) -> None:
        """Tells the others that this rank comes to no further collective."""
        state = RankState.LEFT if error is None else RankState.FAILED
        self._board.close(state=state, error="" if error is None else f"{type(error).__name__}: {error}")

    def _judged(self, call: CollectiveCall) -> Verdict | None:
        try:
            channel = self._channels.get(call.ranks)
            verdict = self._meet(call) if channel is None else self._compare(channel, call)
            return None if verdict is None else self._board.judge(verdict)
        except RuntimeError as failure:
            return Verdict(
                "unresponsive",
                f"rank {self._rank} lost the store that the ranks share while it waited in {call} ({failure}): the "
                "process that holds it, mostly rank 0, has died; look there for the first error",
            )

    def _meet(self, call: CollectiveCall) -> Verdict | None:
        """The first call of these ranks, compared through the store before they connect. Collective over the ranks."""
        digest = hashlib.blake2b(repr(call.ranks).encode(), digest_size=8).hexdigest()
        keys = {member: f"meeting/{digest}/{member}" for member in call.ranks}
        self._store.set(keys[self._rank], json.dumps([call.fingerprint, str(call)]))
        verdict = self._wait(call, lambda seconds: wait_for(self._store, list(keys.values()), seconds), None)
        if verdict is not None:
            return verdict
        shown = {member: json.loads(self._store.get(key)) for member, key in keys.items()}
        fingerprints = {member: entry[0] for member, entry in shown.items()}
        if len(set(fingerprints.values())) > 1:
            return Verdict(
                "mismatch", mismatch_text({member: entry[1] for member, entry in shown.items()}, fingerprints)
            )
        self._channels[call.ranks] = Channel(
            PrefixStore(f"channel/{digest}", self._store),
            call.ranks,
            call.ranks.index(self._rank),
            # The guard's own time-out must come before the transport's.
            2 * self._timeout_seconds + 60.0,
        )
        return None

    def _compare(self, channel: Channel, call: CollectiveCall) -> Verdict | None:
        """Every further call of these ranks. Collective over the ranks."""
        comparison = channel.compare(call.fingerprint, self._board.record.calls)
        try:
            verdict = None if comparison.wait(_PATIENCE_SECONDS) else self._wait(call, comparison.wait, channel)
        except BrokenConnection as broken:
            return self._broken(call, channel, broken)
        if verdict is not None:
            comparison.abandon()
            return verdict
        rows = comparison.rows()
        fingerprints = {member: row[0] for member, row in zip(channel.ranks, rows, strict=True)}
        if len(set(fingerprints.values())) > 1:
            texts = dict(zip(channel.ranks, channel.texts(str(call)), strict=True))
            return Verdict("mismatch", mismatch_text(texts, fingerprints))
        channel.calls = [row[1] for row in rows]
        channel.last = str(call)
        return None

    def _wait(self, call: CollectiveCall, came: Callable[[float], bool], channel: Channel | None) -> Verdict | None:
        """Waits until all members have come (None), or it is clear that they never will.

        That needs two looks which agree: in the first a member may be just between two collectives.
        """
        self._board.show()
        started = time.monotonic()
        pulse = Pulse()
        before: dict[int, RankRecord] = {}
        while not came(_PATIENCE_SECONDS):
            standing = self._board.verdict()
            if standing is not None:
                return standing
            now = time.monotonic()
            records = self._board.read(self._world)
            pulse.observe(records, now)
            obstacle = find_obstacle(self._rank, records)
            if obstacle is not None:
                settled = all(
                    rank in before and record.same_stop(before[rank])
                    for rank, record in records.items()
                    if rank in obstacle.ranks
                )
                if obstacle.kind != "running" and settled:
                    return _hopeless(call, obstacle, records)
                if now - started >= self._timeout_seconds:
                    silent = pulse.silent(obstacle.ranks, now, _SILENCE_SECONDS)
                    return self._late(call, channel, (silent or obstacle.ranks)[0], bool(silent), records)
            before = records
        return None

    def _broken(self, call: CollectiveCall, channel: Channel, broken: BrokenConnection) -> Verdict:
        """Finds out who is behind a broken connection: a rank that left, one that died, or one that gave a verdict."""
        self._board.show()
        started = time.monotonic()
        pulse = Pulse()
        while (now := time.monotonic()) - started < _BROKEN_SECONDS:
            standing = self._board.verdict()
            if standing is not None:
                return standing
            records = self._board.read(self._world)
            pulse.observe(records, now)
            obstacle = find_obstacle(self._rank, records)
            if obstacle is not None and obstacle.kind == "ended":
                return _hopeless(call, obstacle, records)
            silent = pulse.silent(call.ranks, now, _SILENCE_SECONDS)
            if silent:
                return self._late(call, channel, silent[0], True, records)
            time.sleep(_GLANCE_SECONDS)
        return Verdict(
            "unresponsive", f"rank {self._rank} lost its connection to a member while it waited in {call}: {broken}"
        )

    def _late(
        self, call: CollectiveCall, channel: Channel | None, rank: int, silent: bool, records: dict[int, RankRecord]
    ) -> Verdict:
        """Names a rank that did not come, and the last thing that is known of it."""
        record = records.get(rank, RankRecord())
        last = record.call
        # A rank that died shows its record of up to a second before; the last common call may be later.
        if channel is not None and channel.calls_of(rank) > record.calls:
            last = channel.last
        condition = (
            "it shows no sign of life: it died or was stopped" if silent else "it is alive, but busy or stuck elsewhere"
        )
        return Verdict(
            "unresponsive",
            f"rank {rank} did not come to {call}, in which rank {self._rank} waited "
            f"(time-out {self._timeout_seconds:g} s); {condition}; its last collective was {last or 'none'}",
        )


def _hopeless(call: CollectiveCall, obstacle: Obstacle, records: dict[int, RankRecord]) -> Verdict:
    if obstacle.kind == "deadlock":
        stops = {rank: (records[rank].ranks, records[rank].sequence) for rank in obstacle.ranks}
        return Verdict("mismatch", mismatch_text({rank: records[rank].call for rank in obstacle.ranks}, stops))
    rank = obstacle.ranks[0]
    record = records[rank]
    reason = f"raised {record.error}" if record.state is RankState.FAILED else "has finished"
    return Verdict(
        "mismatch", f"rank {rank} {reason}; its last collective was {record.call or 'none'}; the others wait in {call}"
    )
