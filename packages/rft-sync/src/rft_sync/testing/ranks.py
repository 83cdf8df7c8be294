"""Functions run on several gloo ranks of this machine, with a time-out and the first traceback."""

import importlib.util
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankError(RuntimeError):
    """A rank failed, died or did not finish in time; the message holds its traceback."""


def _load(path: str, name: str) -> Callable[..., Any]:
    """The function `name` of the file `path`, imported by file so that test modules need no package."""
    module_name = f"spawned_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]


def _run_rank(
    rank: int,
    world_size: int,
    target: tuple[str, str],
    args: tuple[Any, ...],
    store: str,
    timeout: float,
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1")
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        result = _load(*target)(rank, *args)
        pipe.send((True, result))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 -- the parent raises it
        pipe.send((False, traceback.format_exc()))


def spawn_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120.0) -> list[Any]:
    """Run `function(rank, *args)` on `world_size` processes that share a gloo default group.

    Args:
        function: A module-level function; its file is imported again in each process.
        world_size: Number of processes.
        args: Passed on; picklable.
        timeout_seconds: For the whole run, and for each collective in it.

    Returns:
        The results in rank order; picklable.

    Raises:
        RankError: With the traceback of the first rank that failed, or the ranks that did not finish.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor", "rft_sync"])
    target = (function.__code__.co_filename, function.__name__)
    with tempfile.TemporaryDirectory(prefix="ranks") as folder:
        store = str(Path(folder) / "store")
        pipes: dict[Connection, int] = {}
        processes = []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            arguments = (rank, world_size, target, args, store, timeout_seconds, writer)
            process = context.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            writer.close()
            processes.append(process)
            pipes[reader] = rank
        try:
            return _collect(pipes, timeout_seconds)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()
            for reader in list(pipes):
                reader.close()


def _collect(pipes: dict[Connection, int], timeout_seconds: float) -> list[Any]:
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    waiting = dict(pipes)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} did not finish within {timeout_seconds} seconds")
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = waiting.pop(reader)
            try:
                good, value = reader.recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a result") from None
            if not good:
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]
