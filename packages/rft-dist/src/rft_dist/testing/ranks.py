"""Spawned gloo ranks on this host: started, watched, and ended whatever they do."""

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from rft_dist.agreement import mark_origin, unpacked_error
from rft_dist.config import check_seconds
from rft_dist.errors import ConfigurationError, RankFailedError, RankTimeoutError
from rft_dist.testing.process import READY, RETURNED, RankTask, run_rank

# Start-up is not the function's time: on a busy host importing torch alone can take half a minute.
_START_SECONDS = 300.0
# How long the others may take to report after a rank died without a word.
_GRACE_SECONDS = 10.0
# How long to look for a death after another rank has raised.
_DEATH_SECONDS = 0.2
# How long a late rank's stacks take to be written.
_STACK_SECONDS = 0.3

# Slow imports that are known to start no threads, which a fork would lose.
_SHARED_MODULES = ("numpy", "pytest", "torch._dynamo", "torch.distributed.fsdp", "transformers")

_context = multiprocessing.get_context("forkserver")
_preloaded = ["torch", "torch.distributed", "rft_dist.testing.process"]


def preload(*modules: str) -> None:
    """Names modules that the ranks' parent process imports once, so that no rank needs to.

    Ranks are forked from one server process, which starts with the first `run_ranks` of this process; later calls
    have no effect. Name only modules that start no threads when they are imported.
    """
    _preloaded.extend(name for name in modules if name not in _preloaded)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 60.0,
    guard: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Runs fn(rank, world_size, *args, **kwargs) on spawned ranks and returns what each returned, by rank.

    In every rank the default group (gloo, file store) exists, torch uses one thread, the environment is the
    caller's with torchrun's variables set. The time-out starts when all ranks have started.

    Args:
        fn: a function at the top level of a module (it is found by name in the ranks).
        world_size: number of ranks.
        args: picklable.
        timeout_seconds: how long fn may take.
        guard: run fn under a `CollectiveGuard`, so that mispaired collectives fail at once and say where.
        kwargs: picklable.

    Raises:
        Exception: the first exception of a rank, with its rank in the message and its traceback as a note.
        RankTimeoutError: (a TimeoutError) ranks that did not finish, with their stacks; they were killed.
        RankFailedError: (a RuntimeError) a rank died without an exception; `results` holds what the others returned.
    """
    check_seconds("timeout_seconds", timeout_seconds)
    if type(world_size) is not int or world_size < 1:
        raise ConfigurationError(f"world_size={world_size!r} is no number of ranks: give a whole number from 1 up")
    _start_server()
    with tempfile.TemporaryDirectory(prefix="rft-ranks-") as folder:
        task = RankTask(
            payload=pickle.dumps((fn, args, kwargs)),
            module=fn.__module__,
            module_file=getattr(sys.modules[fn.__module__], "__file__", None),
            world_size=world_size,
            folder=folder,
            environment=dict(os.environ),
            port=_free_port(),
            # The parent's time-out comes first: it knows which rank is late.
            timeout_seconds=timeout_seconds + 60.0,
            guard=guard,
        )
        with _started(task) as ranks:
            return _outcome(ranks, timeout_seconds)


@dataclass
class _Rank:
    """A started rank as its parent sees it."""

    rank: int
    process: ForkServerProcess
    pipe: Connection
    stack_file: Path
    ready: bool = False
    reported: bool = False
    returned: bool = False
    result: Any = None
    error: bytes | None = None

    def receive(self) -> None:
        """Takes one report from the pipe; a closed pipe says that the rank is gone."""
        try:
            kind, payload = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            self.reported = True
            return
        if kind == READY:
            self.ready = True
            return
        self.reported = True
        if kind == RETURNED:
            self.returned, self.result = True, pickle.loads(payload)
        else:
            self.error = payload

    @property
    def died(self) -> bool:
        """Gone without a result or an exception."""
        return self.reported and not self.returned and self.error is None

    @property
    def failed(self) -> bool:
        """Ended without a result."""
        return self.reported and not self.returned


def _start_server() -> None:
    # What the caller has imported its ranks will need: once in their parent is cheaper than once in each of them.
    preload(*(name for name in _SHARED_MODULES if name in sys.modules))
    _context.set_forkserver_preload(_preloaded)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _started(task: RankTask) -> Iterator[list[_Rank]]:
    ranks: list[_Rank] = []
    try:
        for rank in range(task.world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=run_rank, args=(task, rank, theirs), name=f"rank-{rank}")
            process.start()
            theirs.close()
            ranks.append(_Rank(rank, process, ours, task.stack_file(rank)))
        yield ranks
    finally:
        for started in ranks:
            started.process.kill()
        for started in ranks:
            started.process.join()
            started.process.close()
            started.pipe.close()


def _listen(ranks: list[_Rank], done: Callable[[_Rank], bool], seconds: float) -> list[_Rank]:
    """Takes reports until all ranks are done, one has failed, or the time is over; returns the late ones."""
    deadline = time.monotonic() + seconds
    while waiting := [rank for rank in ranks if not done(rank)]:
        if any(rank.failed for rank in ranks):
            return []
        heard = wait([rank.pipe for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
        if not heard:
            return waiting
        for rank in waiting:
            if rank.pipe in heard:
                rank.receive()
    return []


def _outcome(ranks: list[_Rank], timeout_seconds: float) -> list[Any]:
    late = _listen(ranks, lambda rank: rank.ready or rank.reported, _START_SECONDS)
    if not late and not any(rank.failed for rank in ranks):
        for rank in ranks:
            with suppress(BrokenPipeError):  # a rank that died meanwhile is found out by listening
                rank.pipe.send(None)
        late = _listen(ranks, lambda rank: rank.reported, timeout_seconds)
    if late:
        raise _timeout(ranks, late, timeout_seconds)
    first = next((rank for rank in ranks if rank.failed), None)
    if first is not None:
        raise _failure(ranks, first)
    for rank in ranks:
        _release(rank, len(ranks))
    return [rank.result for rank in ranks]


def _release(rank: _Rank, world_size: int) -> None:
    """Lets a rank that has returned end, and checks how it ends."""
    rank.pipe.close()
    rank.process.join(_GRACE_SECONDS)
    if rank.process.exitcode != 0:
        raise RankFailedError(
            f"rank {rank.rank} of {world_size} returned, but did not end well (exit code {rank.process.exitcode}; "
            "None: it hung): close the groups, threads and files that the function opened"
        )


def _failure(ranks: list[_Rank], first: _Rank) -> BaseException:
    # A death closes sockets, so that the others' complaints may be heard before it: look for one before blaming them.
    quiet = [rank for rank in ranks if not rank.reported]
    deadline = time.monotonic() + (_GRACE_SECONDS if first.died else _DEATH_SECONDS)
    while quiet and (heard := wait([rank.pipe for rank in quiet], timeout=max(0.0, deadline - time.monotonic()))):
        for rank in quiet:
            if rank.pipe in heard:
                rank.receive()
        quiet = [rank for rank in quiet if not rank.reported]
    dead = next((rank for rank in ranks if rank.died), None)
    if dead is None:
        assert first.error is not None
        return _rank_error(first, len(ranks))
    failure = RankFailedError(
        f"rank {dead.rank} of {len(ranks)} died without a result or an exception (exit code {dead.process.exitcode}; "
        "negative: the signal that killed it)",
        {rank.rank: rank.result for rank in ranks if rank.returned},
    )
    for rank in ranks:
        if rank.error is not None:
            failure.add_note(f"rank {rank.rank} then raised:\n{_rank_error(rank, len(ranks))!r}")
    return failure


def _rank_error(rank: _Rank, world_size: int) -> BaseException:
    assert rank.error is not None
    error = unpacked_error(rank.error)
    origin = f"rank {rank.rank} of {world_size}"
    if isinstance(error, SystemExit | KeyboardInterrupt | GeneratorExit):
        # Raised here they would end the caller itself.
        failure = RankFailedError(f"{origin} raised {error!r}")
        for note in getattr(error, "__notes__", []):
            failure.add_note(note)
        return failure
    mark_origin(error, origin)
    return error


def _timeout(ranks: list[_Rank], late: list[_Rank], timeout_seconds: float) -> RankTimeoutError:
    named = ", ".join(str(rank.rank) for rank in late)
    what = f"did not finish within {timeout_seconds:g} s" if all(rank.ready for rank in ranks) else "did not start"
    error = RankTimeoutError(
        f"rank {named} of {len(ranks)} {what} and was killed: its stack follows",
        {rank.rank: rank.result for rank in ranks if rank.returned},
    )
    for rank in late:
        pid = rank.process.pid
        if rank.ready and pid is not None:
            os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACK_SECONDS)
    for rank in late:
        stack = rank.stack_file.read_text() if rank.stack_file.exists() else ""
        error.add_note(f"stack of rank {rank.rank} (most recent call first):\n{stack.rstrip() or 'it did not answer'}")
    return error
