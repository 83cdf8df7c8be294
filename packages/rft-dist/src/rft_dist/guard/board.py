"""The store where ranks show their records to each other and where the first verdict stands."""

import contextlib
import json
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch._C._distributed_c10d import Store

from rft_dist.errors import CollectiveMismatchError, DistError, RankUnresponsiveError
from rft_dist.guard.records import RankRecord

_BEAT_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Verdict:
    """What went wrong, the same text on every rank.

    Attributes:
        kind: "mismatch" or "unresponsive".
        text: who, what, where.
    """

    kind: str
    text: str

    def throw(self) -> NoReturn:
        """Raises the verdict's error."""
        error: type[DistError] = CollectiveMismatchError if self.kind == "mismatch" else RankUnresponsiveError
        raise error(self.text)


class Board:
    """This rank's view of the shared store: its own record, the others', and the verdict.

    A background thread shows this rank's record about once a second, so that the others can tell a busy rank from a
    dead one. The store is a connection of its own: a call that waits on the default group's must not silence it.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self.rank = rank
        self.store = store
        self._record = RankRecord()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rft-dist-guard", daemon=True)
        self._thread.start()

    @property
    def record(self) -> RankRecord:
        """This rank's own record."""
        return self._record

    def update(self, **changes: Any) -> None:
        """Changes this rank's record; the others see it with the next beat or `show`."""
        with self._lock:
            self._record = replace(self._record, **changes)

    def show(self) -> None:
        """Writes this rank's record to the store now."""
        with self._lock:
            self._record = replace(self._record, beat=self._record.beat + 1)
            self.store.set(f"record/{self.rank}", self._record.to_json())

    def read(self, ranks: Iterable[int]) -> dict[int, RankRecord]:
        """The records that these ranks have shown; a rank that has shown none is left out."""
        keys = {rank: f"record/{rank}" for rank in ranks}
        return {
            rank: RankRecord.from_json(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])
        }

    def verdict(self) -> Verdict | None:
        """The verdict, once there is one."""
        if not self.store.check(["verdict"]):
            return None
        return Verdict(**json.loads(self.store.get("verdict")))

    def judge(self, verdict: Verdict) -> Verdict:
        """Gives a verdict; returns the one that stands, which is the first that any rank gave."""
        text = json.dumps({"kind": verdict.kind, "text": verdict.text})
        return Verdict(**json.loads(self.store.compare_set("verdict", "", text)))

    def close(self, **changes: Any) -> None:
        """Shows the last record and ends the thread."""
        self._stop.set()
        self._thread.join()
        self.update(**changes)
        # The process that holds the store may have ended before this one: then nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            self.show()

    def _beat(self) -> None:
        # A store that is gone ends the thread: the next check finds that out and says so.
        with contextlib.suppress(RuntimeError):
            while True:
                self.show()
                if self._stop.wait(_BEAT_SECONDS):
                    return


def wait_for(store: Store, keys: list[str], seconds: float) -> bool:
    """Waits for keys in a store; False when they did not all come in time.

    Asks again and again rather than with the store's own `wait`: that blocks the connection for everybody else, and
    each kind of store reports its end in another way.
    """
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE_SECONDS
    while not store.check(keys):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True
