"""A checkpoint whose files are written in the background, as ranks see it that cannot ask each other."""

import fcntl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rft_trainer.checkpoint.files import write_durably
from rft_trainer.errors import CheckpointError

_LOCK = ".completing"


def marked(pending: Sequence[Future[Any]], partial: Path, rank: int) -> Future[None]:
    """Done when all of `pending` are and the disk says so; raises the first error, which the disk then tells too."""
    waiter = ThreadPoolExecutor(1, "checkpoint")
    future = waiter.submit(_mark, pending, partial, rank)
    waiter.shutdown(wait=False)
    return future


def _mark(pending: Sequence[Future[Any]], partial: Path, rank: int) -> None:
    mark = partial / f"written_{rank:05d}"
    try:
        for write in pending:
            write.result()
    except Exception as failure:
        write_durably(mark, f"{type(failure).__name__}: {failure}")
        raise
    write_durably(mark, "")


def wait_for_marks(partial: Path, ranks: int, timeout_seconds: float) -> None:
    """Wait until every rank has written its files, or one of them has completed the checkpoint.

    Raises:
        CheckpointError: a rank could not write, or not all have in time.
    """
    deadline = time.monotonic() + timeout_seconds
    marks = {rank: partial / f"written_{rank:05d}" for rank in range(ranks)}
    while partial.is_dir():
        missing = [rank for rank, mark in marks.items() if not mark.is_file()]
        if not missing:
            break
        if time.monotonic() > deadline:
            raise CheckpointError(f"ranks {missing} have not written their part within {timeout_seconds:g} seconds")
        time.sleep(0.02)
    for rank, mark in marks.items():
        failure = _content(mark)
        if failure:
            raise CheckpointError(f"rank {rank}: {failure}")


def _content(mark: Path) -> str:
    """Empty too when the rank that completed the checkpoint has taken it away."""
    try:
        return mark.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


@contextmanager
def alone_in(root: Path) -> Iterator[None]:
    """One process at a time is inside. The kernel frees the lock of one that ends."""
    path = root / _LOCK
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
