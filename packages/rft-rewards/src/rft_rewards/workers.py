"""Processes that run a function under a time limit which really ends it."""

import concurrent.futures
import contextlib
import os
import pickle
import queue
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rft_rewards.errors import GraderError
from rft_rewards.worker import BOOTSTRAP, FAILED, GRACE_SECONDS, HEADER, TIMED_OUT, VALUE

START_SECONDS = 120.0
_CHUNK = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one task: `state` is "value", "timed out" or "failed" (then `value` is the reason)."""

    state: str
    value: Any = None


_ENDED = Outcome(FAILED, "the worker process ended")


class WorkerPool:
    """Runs `package.module:name` on tasks in processes of its own.

    A task that exceeds its limit is interrupted; one that does not obey within a second, because it is busy in C,
    is ended by killing its process, and a new one takes its place. The processes are fresh interpreters, so the pool
    may be used in a process with CUDA, NCCL and threads, from any thread, and by several threads at once. They start
    with the first tasks, and end with `close`, with the last reference to the pool, or with this process, however
    it ends.

    Args:
        target: importable function of one argument; arguments and results are pickled.
        workers: processes, at least 1.
        timeout_seconds: limit for each task.
        memory_bytes: limit on the address space of each process; None for none.

    Raises:
        ValueError: `workers` or `timeout_seconds` is out of range.
    """

    def __init__(
        self, target: str, *, workers: int = 2, timeout_seconds: float = 5.0, memory_bytes: int | None = None
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}: give 1 or more")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds}: give more than 0")
        self.workers = workers
        self.timeout_seconds = timeout_seconds
        self._setup = {"target": target, "timeout_seconds": timeout_seconds, "memory_bytes": memory_bytes}
        self._lock = threading.Lock()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._started: list[_Worker] = []
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._owner = os.getpid()

    def map(self, tasks: Sequence[Any]) -> list[Outcome]:
        """Outcome of every task, in order.

        Raises:
            GraderError: a process does not start, because the target cannot be imported or the start takes too long.
        """
        if not tasks:
            return []
        threads = self._ready_threads()
        size = max(1, min(_CHUNK, -(-len(tasks) // self.workers)))
        chunks = [tasks[start : start + size] for start in range(0, len(tasks), size)]
        futures = [threads.submit(self._run_chunk, chunk) for chunk in chunks]
        return [outcome for future in futures for outcome in future.result()]

    def process_ids(self) -> list[int]:
        """Ids of the live processes."""
        return [worker.process.pid for worker in self._started if worker.process is not None]

    def close(self) -> None:
        """End the processes; the pool starts new ones when it is used again."""
        with self._lock:
            threads, self._threads = self._threads, None
            started, self._started = self._started, []
            self._idle = queue.SimpleQueue()
        for worker in started:
            worker.kill()
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)

    def _ready_threads(self) -> concurrent.futures.ThreadPoolExecutor:
        with self._lock:
            if self._owner != os.getpid():  # a forked child shares no pipe with the parent's workers
                self._owner, self._threads, self._started = os.getpid(), None, []
                self._idle = queue.SimpleQueue()
            if self._threads is None:
                self._threads = concurrent.futures.ThreadPoolExecutor(self.workers, thread_name_prefix="reward-worker")
                self._started = [_Worker(self._setup) for _ in range(self.workers)]
                for worker in self._started:
                    self._idle.put(worker)
            return self._threads

    def _run_chunk(self, tasks: Sequence[Any]) -> list[Outcome]:
        idle = self._idle
        worker = idle.get()
        try:
            return worker.run(tasks)
        finally:
            idle.put(worker)


class _Worker:
    """One process and its pipes; used by one thread at a time."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self.process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def run(self, tasks: Sequence[Any]) -> list[Outcome]:
        """Outcomes of `tasks`. A task is tried again once when the process ends under it: it may have died before."""
        outcomes: list[Outcome] = []
        again = -1
        while len(outcomes) < len(tasks):
            # A kill loses what the process had not answered: the task under way is charged, the rest is sent again.
            for outcome in self._attempt(tasks[len(outcomes) :]):
                if outcome == _ENDED and again != len(outcomes):
                    again = len(outcomes)
                    break
                outcomes.append(outcome)
        return outcomes

    def _attempt(self, tasks: Sequence[Any]) -> Iterator[Outcome]:
        """Outcomes up to the first that ended the process."""
        if not self._send(list(tasks)):
            yield _ENDED
            return
        for _ in tasks:
            yield self._receive(self._setup["timeout_seconds"] + GRACE_SECONDS)
            if self.process is None:
                return

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None and self._finalizer is not None:
            self._finalizer()

    def _send(self, tasks: list[Any]) -> bool:
        process = self.process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(pickle.dumps(tasks))
            process.stdin.flush()
        except BrokenPipeError:
            self.kill()
            return False
        return True

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=-1
        )
        self.process = process
        self._finalizer = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        pickle.dump({**self._setup, "path": list(sys.path)}, process.stdin)
        process.stdin.flush()
        outcome = self._receive(START_SECONDS)
        if outcome.state != VALUE:
            self.kill()
            raise GraderError(
                f"no worker process for {self._setup['target']}: {outcome.value or outcome.state}; "
                "check that it can be imported in a fresh interpreter"
            )
        return process

    def _receive(self, limit_seconds: float) -> Outcome:
        """The next reply; past the limit the process is killed and the outcome is a time-out."""
        deadline = time.monotonic() + limit_seconds
        try:
            (length,) = HEADER.unpack(self._read(HEADER.size, deadline))
            state, value = pickle.loads(self._read(length, deadline))
        except TimeoutError:
            self.kill()
            return Outcome(TIMED_OUT)
        except EOFError:
            self.kill()
            return _ENDED
        return Outcome(state, value)

    def _read(self, length: int, deadline: float) -> bytes:
        process = self.process
        assert process is not None
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        parts: list[bytes] = []
        while length:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise TimeoutError
            part = os.read(descriptor, min(length, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
