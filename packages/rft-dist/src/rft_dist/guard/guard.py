"""The guard itself: it stands before every collective of torch.distributed and asks the other ranks first."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from rft_dist.config import check_seconds
from rft_dist.errors import GroupError
from rft_dist.guard.calls import OPERATIONS, Describer, call_site
from rft_dist.guard.checker import Checker

_tag: ContextVar[str] = ContextVar("rft_dist_collective_tag", default="")
# How many guards this default group has had: ranks that enter their second guard must not read the first one's records.
_generations: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()
_active: "CollectiveGuard | None" = None


@contextmanager
def collective_tag(name: str) -> Iterator[None]:
    """Says what the collectives inside are for: the guard compares the tag over ranks and names it in errors."""
    before = _tag.set(name)
    try:
        yield
    finally:
        _tag.reset(before)


class CollectiveGuard:
    """While it is entered, ranks compare every collective of `torch.distributed` before they run it.

    Compared are the tag, the function, shapes and dtypes where they must agree, root, reduction, the group, and the
    number of the call. Ranks that differ raise the same error, which names the first of them, what it called and
    where, and what the others called. The same holds when a rank leaves while others wait for it, when ranks wait for
    each other in different groups, and when a rank dies; one that is alive but does not come is named when the time-out
    is over.

    A context manager for all ranks of the default group; a second one inside it changes nothing. Outside it nothing of
    `torch.distributed` is changed, so that it costs nothing. Inside, a collective waits for one exchange of 16 bytes
    over gloo. Not compared are point-to-point calls, collectives that C++ starts itself (DistributedDataParallel's
    buckets), functional collectives, and compiled graphs.

    Args:
        timeout_seconds: how long a rank waits for the others before it names one of them as stuck.

    Raises:
        ConfigurationError: (a ValueError) the time-out is no positive number of seconds.
    """

    def __init__(self, *, timeout_seconds: float = 60.0) -> None:
        check_seconds("timeout_seconds", timeout_seconds)
        self._timeout_seconds = timeout_seconds
        self._checker: Checker | None = None
        self._functions: dict[str, tuple[Any, Any]] = {}
        self._inside = threading.local()

    def __enter__(self) -> Self:
        global _active
        if _active is not None:
            return self
        if not dist.is_initialized():
            raise GroupError(
                "there is no default process group to guard: enter CollectiveGuard inside distributed_session()"
            )
        self._checker = Checker(_own_store(), dist.get_rank(), dist.get_world_size(), self._timeout_seconds)
        _active = self
        self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        if self._checker is None:
            return
        self._remove()
        _active = None
        self._checker.close(error)
        self._checker = None

    def _install(self) -> None:
        for op in OPERATIONS:
            function = getattr(dist, op, None)  # some names are younger than the oldest torch that is supported
            if function is not None:
                self._functions[op] = (function, self._guarded(op, function))
        self._replace(1)

    def _remove(self) -> None:
        self._replace(0)
        self._functions.clear()

    def _replace(self, which: int) -> None:
        # Both modules: callers look functions up in the package, torch's own functions call each other in the other.
        for op, functions in self._functions.items():
            setattr(dist, op, functions[which])
            setattr(dist.distributed_c10d, op, functions[which])

    def _guarded(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        describer = Describer(op, function)

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            # A library may have kept this function from an earlier guard; collectives inside a collective are its own.
            if self._checker is None or getattr(self._inside, "collective", False) or torch.compiler.is_compiling():
                return function(*args, **kwargs)
            self._inside.collective = True
            try:
                self._check(describer, args, kwargs)
                return function(*args, **kwargs)
            finally:
                self._inside.collective = False

        return guarded

    def _check(self, describer: Describer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares one call. Collective over its group."""
        arguments = describer.arguments(*args, **kwargs)
        if describer.op == "new_group":
            if arguments.get("use_local_synchronization"):
                return
            group: Any = dist.group.WORLD
        else:
            group = arguments.get("group") or dist.group.WORLD
        if group is None or group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
            return
        assert self._checker is not None
        self._checker.check(
            op=describer.op,
            group=group.group_name,
            ranks=tuple(dist.get_process_group_ranks(group)),
            signature=describer.signature(arguments),
            detail=describer.detail(arguments),
            tag=_tag.get(),
            site=call_site(),
        )


def _own_store() -> Store:
    """A connection of the guard's own to the default group's store, with a fresh name space."""
    world = dist.group.WORLD
    assert world is not None
    generation = _generations.get(world, 0) + 1
    _generations[world] = generation
    store: Any = dist.distributed_c10d._get_default_store()
    return PrefixStore(f"rft-dist-guard/{generation}", store.clone())
