"""Agreement of ranks before they go on, so that an error on one becomes the same error on all."""

import pickle

import torch
import torch.distributed as dist

from rft_sync.errors import ManifestMismatch, WeightSyncError
from rft_sync.wire import gather_values, wire_device


def is_distributed() -> bool:
    """Whether a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def as_sync_error(error: BaseException) -> WeightSyncError:
    """`error` itself when it is of the family and can cross processes, else a `WeightSyncError` that quotes it."""
    if isinstance(error, WeightSyncError):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 -- whatever a foreign subclass raises here, its text can still be sent
            return WeightSyncError(f"{type(error).__name__}: {error}", error.names)
        return error
    return WeightSyncError(f"{type(error).__name__}: {error}")


def raise_together(error: BaseException | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank the error of the first rank that has one; return if none has. Collective over `group`.

    Without a default process group, or alone in the group, it raises the given error at once.
    """
    if not is_distributed() or dist.get_world_size(group) == 1:
        if error is not None:
            raise as_sync_error(error) from error
        return
    failed = torch.tensor([0 if error is None else 1], dtype=torch.int32, device=wire_device(group))
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
    if not failed.item():
        return
    errors = gather_values(None if error is None else as_sync_error(error), group)
    rank = next(index for index, found in enumerate(errors) if found is not None)
    first: WeightSyncError = errors[rank]
    if len(errors) > 1:
        first = type(first)(f"rank {rank}: {first.message}", first.names)
    raise first from error


def any_rank(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether `flag` holds on a rank of `group`. Collective over `group`."""
    if not is_distributed() or dist.get_world_size(group) == 1:
        return flag
    found = torch.tensor([int(flag)], dtype=torch.int32, device=wire_device(group))
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return bool(found.item())


def agree_on_digest(digest: str | None, error: BaseException | None, group: dist.ProcessGroup | None) -> None:
    """Check that all ranks plan the same update. Collective over `group`.

    Raises:
        ManifestMismatch: Digests differ; on every rank.
        WeightSyncError: A rank could not even plan; on every rank.
    """
    raise_together(error, group)
    if not is_distributed() or digest is None or dist.get_world_size(group) == 1:
        return
    digests = gather_values(digest, group)
    if len(set(digests)) > 1:
        listed = ", ".join(f"rank {rank}: {value[:12]}" for rank, value in enumerate(digests))
        raise ManifestMismatch(
            f"ranks plan different updates ({listed}); give every rank the same model, dtype and bucket_bytes"
        )
