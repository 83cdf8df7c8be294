"""What a vLLM worker of this process holds, told from its objects without importing vLLM."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from rft_engines.contract import CUDA_GRAPHS, KV_CACHE, WEIGHTS


def read_memory(found: dict[str, int], worker: Any) -> None:
    """Write device bytes by kind into `found`: weights, KV cache, and graphs where the worker has estimated them.

    Args:
        found: filled in place, since the worker is in this process.
        worker: as `collective_rpc` hands it to a function; a wrapper of the worker or the worker itself.
    """
    worker = getattr(worker, "worker", None) or worker
    runner = worker.model_runner
    found[WEIGHTS] = _bytes(runner.get_model().parameters())
    found[KV_CACHE] = _bytes(_tensors(getattr(runner, "kv_caches", ())))
    graphs = int(getattr(worker, "cudagraph_memory_estimate", 0) or 0)
    if graphs:
        found[CUDA_GRAPHS] = graphs


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, (list, tuple)):
        for each in nested:
            yield from _tensors(each)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of the distinct blocks of memory below."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
