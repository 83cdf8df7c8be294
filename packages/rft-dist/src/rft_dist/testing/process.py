"""What a spawned rank does: it loads the function, joins the others, runs it and reports."""

import faulthandler
import importlib.util
import os
import pickle
import random
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from rft_dist.agreement import packed_error
from rft_dist.guard import CollectiveGuard

READY, RETURNED, FAILED = "ready", "returned", "failed"


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """Everything that a rank must know before it can load the function.

    Attributes:
        payload: pickled (function, args, kwargs); readable once `module` is loaded.
        module: name of the function's module in the parent.
        module_file: where that module is, for one that cannot be imported by its name.
        world_size: number of ranks.
        folder: an empty folder for the file store and the stacks of late ranks.
        environment: variables of the parent.
        port: a port that was free a moment ago; nothing of rft-dist takes it.
        timeout_seconds: of the default group.
        guard: whether the function runs under a `CollectiveGuard`.
    """

    payload: bytes
    module: str
    module_file: str | None
    world_size: int
    folder: str
    environment: dict[str, str]
    port: int
    timeout_seconds: float
    guard: bool

    def stack_file(self, rank: int) -> Path:
        """Where the rank writes its threads' stacks when it is asked to."""
        return Path(self.folder) / f"stack-{rank}"


def run_rank(task: RankTask, rank: int, pipe: Connection) -> None:
    """A rank: reports READY, then RETURNED with the result or FAILED with the exception, and ends on release."""
    stack = task.stack_file(rank).open("w")
    # Should the parent be gone, the rank ends itself.
    faulthandler.dump_traceback_later(task.timeout_seconds + 60.0, exit=True, file=stack)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    try:
        _prepare(task, rank)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{task.folder}/store",
            rank=rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.timeout_seconds),
        )
        function, args, kwargs = pickle.loads(task.payload)
        pipe.send((READY, b""))
        # The function may destroy the group at once: no rank starts it before all of them have connected.
        pipe.recv()
        with CollectiveGuard(timeout_seconds=task.timeout_seconds) if task.guard else nullcontext():
            report = (RETURNED, pickle.dumps(function(rank, task.world_size, *args, **kwargs)))
    except BaseException as error:  # noqa: BLE001 - SystemExit too: everything is reported to the parent
        report = (FAILED, packed_error(error))
    pipe.send(report)
    # Sockets stay open until every rank has reported: a late reader of a collective must not find them closed.
    pipe.poll(None)
    if dist.is_initialized():
        dist.destroy_process_group()


def _prepare(task: RankTask, rank: int) -> None:
    os.environ.clear()
    os.environ.update(task.environment)
    os.environ.update(
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(task.world_size),
        LOCAL_WORLD_SIZE=str(task.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(task.port),
    )
    torch.set_num_threads(1)
    random.seed()  # ranks are forks of one process and would draw alike
    if task.module not in sys.modules and task.module_file is not None:
        _load(task.module, task.module_file)


def _load(name: str, file: str) -> None:
    """Imports a module by its name, or by its file where the name leads nowhere (a test imported by its file)."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not (name == missing.name or name.startswith(f"{missing.name}.")):
            raise
    else:
        return
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        sys.modules.setdefault(".".join(parents[:depth]), ModuleType(".".join(parents[:depth])))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
