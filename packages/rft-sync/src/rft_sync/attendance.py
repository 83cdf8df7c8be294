"""Do all ranks make the same call? A rank that stays away is named, in place of a collective that waits for it."""

from datetime import timedelta

import torch.distributed as dist

from rft_sync.errors import ManifestMismatch

DEFAULT_SECONDS = 600.0


def await_ranks(call: str, group: dist.ProcessGroup | None, seconds: float) -> None:
    """Wait until every rank of `group` has come to `call`, through the group's store and without a collective.

    Alone, or without a default process group, it returns at once. A refused call is not counted, so that the next one
    of all ranks works.

    Args:
        call: What the ranks call, for the message.
        group: Ranks that must come; the default group if None.
        seconds: How long to wait for the last of them.

    Raises:
        ManifestMismatch: Names the ranks that did not come.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return
    members = group if group is not None else dist.group.WORLD
    assert members is not None  # there is a default group
    store, own, world = members.get_group_store(), dist.get_rank(group), dist.get_world_size(group)
    # Counted in the store and not here: a group and its count end together.
    counter = f"rft_sync/calls/{own}"
    number = store.add(counter, 1)
    store.set(_key(own, number), "here")
    try:
        store.wait([_key(rank, number) for rank in range(world)], timedelta(seconds=seconds))
    except RuntimeError as error:
        absent = [rank for rank in range(world) if not store.check([_key(rank, number)])]
        store.delete_key(_key(own, number))
        store.add(counter, -1)
        raise ManifestMismatch(
            f"ranks {absent} of {world} did not call {call} within {seconds:g} s of rank {own}; call it on every rank "
            "of the group"
        ) from error
    if number > 1:  # every rank that is here has left the call before
        store.delete_key(_key(own, number - 1))


def _key(rank: int, number: int) -> str:
    return f"rft_sync/call/{number}/{rank}"
