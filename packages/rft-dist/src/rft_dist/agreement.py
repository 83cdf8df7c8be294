"""Turning one rank's exception into everybody's, so that nobody waits for a rank that has given up."""

import pickle
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch.distributed as dist

from rft_dist.errors import RemoteError
from rft_dist.exchange import gather_bytes, gather_rows, group_rank, group_ranks, group_size

T = TypeVar("T")

_ORIGIN = "_rft_dist_origin"


def raise_together(error: BaseException | None, group: dist.ProcessGroup | None = None) -> None:
    """Raises one rank's error on every rank of the group. Collective over the group.

    Every rank calls it at the same point, with the exception it caught or None. Where several ranks failed, the error
    of the first of them is raised everywhere. One small all-gather when nothing failed.

    Args:
        error: this rank's exception, or None.
        group: a group of CPU tensors (gloo); None means the default group, or this process alone without one.

    Raises:
        BaseException: the first failing rank's exception, with its rank in the message; on the other ranks its
            traceback is a note. An exception that cannot be pickled arrives as `RemoteError`.
    """
    failed = [row[0] for row in gather_rows([int(error is not None)], group)]
    if any(failed):
        first = failed.index(1)
        payload = packed_error(error) if error is not None and group_rank(group) == first else b""
        raise_from(first, gather_bytes(payload, [], group)[first][1], error, group)


def raise_from(
    first: int, payload: bytes | bytearray, error: BaseException | None, group: dist.ProcessGroup | None
) -> NoReturn:
    """Raises the packed error of the rank at position `first`; that rank raises its own exception object."""
    if error is None or group_rank(group) != first:
        error = unpacked_error(payload)
    size = group_size(group)
    if size > 1:
        mark_origin(error, f"raised on rank {group_ranks(group)[first]}, position {first} of {size} in its group")
    raise error


def run_on_first_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Runs the action on the group's first rank; all ranks leave with what it returned. Collective over the group.

    For work that must be done once, such as making a folder or writing a file on a shared disk.

    Args:
        action: called on the first rank only; it must call no collective. Its result must be picklable.
        group: a group of CPU tensors (gloo); None means the default group, or this process alone without one.

    Raises:
        BaseException: what the action raised, on every rank.
    """
    error: BaseException | None = None
    payload = b""
    if group_rank(group) == 0:
        try:
            payload = pickle.dumps(action())
        except BaseException as failure:  # noqa: BLE001 - raised on all ranks below
            error = failure
    raise_together(error, group)
    result: T = pickle.loads(gather_bytes(payload, [], group)[0][1])
    return result


def mark_origin(error: BaseException, origin: str) -> None:
    """Adds where an exception came from to its message, once."""
    if getattr(error, _ORIGIN, None) is not None:
        return
    if error.args and isinstance(error.args[0], str) and not isinstance(error, OSError | UnicodeError):
        error.args = (f"{error.args[0]} [{origin}]", *error.args[1:])
    error.add_note(origin)
    setattr(error, _ORIGIN, origin)


def packed_error(error: BaseException) -> bytes:
    """The exception with its traceback as text, ready to travel; `RemoteError` stands in where it cannot."""
    text = "".join(traceback.format_exception(error))
    for candidate in (error, RemoteError(f"{type(error).__name__}: {error}")):
        try:
            payload = pickle.dumps((candidate, text))
            pickle.loads(payload)
        except Exception:  # noqa: BLE001 - any class may refuse to be pickled or rebuilt, in its own way
            continue
        return payload
    raise AssertionError("RemoteError is picklable")


def unpacked_error(payload: bytes | bytearray) -> BaseException:
    """The exception of `packed_error`, with the other process's traceback as a note."""
    try:
        error, text = pickle.loads(payload)
    except Exception as failure:  # noqa: BLE001 - a class that exists only where the error was raised
        error, text = RemoteError(f"an exception whose class this process lacks ({failure})"), ""
    assert isinstance(error, BaseException)
    if text:
        error.add_note(f"traceback on the rank that raised it:\n{text.rstrip()}")
    return error
