"""The child side of `WorkerPool`: runs one target function on tasks read from standard input.

Started as a fresh interpreter, never forked, so that it inherits no CUDA context, NCCL communicator or lock.
"""

import importlib
import os
import pickle
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, BinaryIO

VALUE, TIMED_OUT, FAILED = "value", "timed out", "failed"
HEADER = struct.Struct("<Q")
GRACE_SECONDS = 1.0
"""Between the alarm, which interpreted code obeys, and the kill, which also ends a call into C."""

BOOTSTRAP = (
    "import pickle, sys; setup = pickle.load(sys.stdin.buffer); sys.path[:] = setup['path']; "
    "import rft_rewards.worker as worker; worker.serve(setup)"
)


class _Alarm(BaseException):
    """The soft limit; not an Exception, so that a task which catches everything does not swallow it."""


def serve(setup: dict[str, Any]) -> None:
    """Answer every pickled list of tasks on standard input with one framed pickle per task, until the input ends."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a task prints must not reach the reply stream
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at the terminal is the parent's to handle
    signal.signal(signal.SIGALRM, _raise_alarm)
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    if setup["memory_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    try:
        module, _, name = setup["target"].partition(":")
        target = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - reported to the parent, which raises
        _reply(replies, (FAILED, f"{type(error).__name__}: {error}"))
        return
    _reply(replies, (VALUE, None))
    while True:
        try:
            tasks = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        for task in tasks:
            _reply(replies, _outcome(target, task, setup["timeout_seconds"]))


def _outcome(target: Callable[[Any], Any], task: Any, timeout_seconds: float) -> tuple[str, Any]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    # A worker whose parent was killed while a task holds the interpreter in C ends by the limit on its own CPU time.
    cpu_seconds = int(used.ru_utime + used.ru_stime + timeout_seconds + GRACE_SECONDS) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, timeout_seconds)
            value = target(task)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _Alarm:
        return TIMED_OUT, None
    except Exception as error:  # noqa: BLE001 - a task may raise anything; the parent decides
        return FAILED, f"{type(error).__name__}: {error}"[:2000]
    return VALUE, value


def _raise_alarm(number: int, frame: FrameType | None) -> None:
    raise _Alarm


def _reply(stream: BinaryIO, outcome: tuple[str, Any]) -> None:
    try:
        payload = pickle.dumps(outcome)
    except Exception as error:  # noqa: BLE001 - a value that cannot be pickled is the task's failure
        payload = pickle.dumps((FAILED, f"result cannot be pickled: {error}"))
    frame = memoryview(HEADER.pack(len(payload)) + payload)
    while frame:
        frame = frame[stream.write(frame) or 0 :]


def _leave_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
