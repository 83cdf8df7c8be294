"""The leader's hold on the engine's processes."""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rft_engines.errors import EngineDiedError, EngineStartError
from rft_engines.isolation import environment_variables, preserved_random_state

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_SECONDS = 0.25
# torchrun's store belongs to the trainer: the engine's own rendezvous must not find it.
_HIDDEN = ("TORCHELASTIC_USE_AGENT_STORE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# SGLang keeps what its vision tower made of a picture, and neither a flush nor new weights end that.
_ENVIRONMENT = {**dict.fromkeys(_HIDDEN), "SGLANG_VLM_CACHE_SIZE_MB": "0"}

# A signal is the whole process's, and so is what it says.
_failed = threading.Event()


def note_failure(signal_number: int, frame: FrameType | None) -> None:
    """Handler of the signal by which SGLang's processes say that they fail. It travels to them by its name."""
    _failed.set()


class EngineProcess:
    """A started `sglang.Engine` and its child processes.

    Calls run in a thread of their own while this thread watches the children, so that a dead engine ends the call
    within a second instead of leaving the rank, and with it its group, waiting.
    """

    def __init__(self, engine_class: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Start the engine in the main thread, and put environment, start method and random state back.

        Raises:
            EngineStartError: the engine did not start.
        """
        _failed.clear()
        start_method = multiprocessing.get_start_method(allow_none=True)
        self._sigquit = signal.getsignal(signal.SIGQUIT)
        # SGLang's processes send SIGQUIT when they fail, and its own handler kills the trainer with everything else.
        arguments = {"custom_sigquit_handler": note_failure} | arguments
        try:
            with preserved_random_state(), environment_variables(_ENVIRONMENT):
                self.engine: Any = engine_class(**arguments)
        except Exception as failure:
            raise EngineStartError(f"SGLang did not start: {type(failure).__name__}: {failure}") from failure
        finally:
            multiprocessing.set_start_method(start_method, force=True)
        self._pids = tuple(self.engine.get_all_child_pids())

    def dead_children(self) -> list[int]:
        """Process ids of the engine's children that have ended."""
        return [pid for pid in self._pids if not _is_alive(pid)]

    def call(self, run: Callable[[Any], T]) -> T:
        """`run(engine)`, or an error as soon as a child is dead.

        Raises:
            EngineDiedError: a child process ended; whatever else `run` raises.
        """
        self._require_alive()
        result: list[T] = []
        failures: list[BaseException] = []
        done = threading.Event()

        def work() -> None:
            try:
                result.append(run(self.engine))
            except BaseException as failure:  # noqa: BLE001 - raised in the calling thread
                failures.append(failure)
            finally:
                done.set()

        # A daemon: a call that a dead engine never answers must not keep the process from ending.
        threading.Thread(target=work, name="sglang-call", daemon=True).start()
        while not done.wait(_POLL_SECONDS):
            self._require_alive()
        if failures:
            self._require_alive()
            raise failures[0]
        return result[0]

    def _require_alive(self) -> None:
        dead = self.dead_children()
        if dead or _failed.is_set():
            raise EngineDiedError(
                f"SGLang's process {dead or '(unknown, it sent SIGQUIT)'} has ended: its own log above says why; "
                f"close() this engine and create a new one"
            )

    def abort_all(self) -> None:
        """Ask the engine to end all running requests; any thread may call this."""
        manager = self.engine.tokenizer_manager
        self.engine.loop.call_soon_threadsafe(lambda: manager.abort_request(abort_all=True))

    def stop(self) -> None:
        """Shut the engine down and see that none of its children stays behind."""
        try:
            self.engine.shutdown()
        finally:
            for pid in self._pids:
                if _is_alive(pid):
                    logger.warning("SGLang's process %d outlived its shutdown and is killed", pid)
                    os.kill(pid, signal.SIGKILL)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGQUIT, self._sigquit)


def _is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The state follows the command, which is in brackets and may hold any character.
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
