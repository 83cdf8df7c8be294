"""Ending vLLM without ending the trainer's process group."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def kept_process_group() -> Iterator[None]:
    """Keep torch's default process group over an engine shutdown in the block.

    vLLM's engine core (0.32) ends with destroying the default group, also one that was there before it and that the
    trainer goes on using. Inside the block only vLLM's own groups are destroyed.
    """
    from vllm.distributed import parallel_state

    state: Any = parallel_state
    destroy = state.destroy_distributed_environment

    def forget_world() -> None:
        world = state._WORLD
        if world is not None:
            world.destroy()
        state._WORLD = None
        # Absent in older releases, where setting it does nothing.
        state._NODE_COUNT = None

    state.destroy_distributed_environment = forget_world
    try:
        yield
    finally:
        state.destroy_distributed_environment = destroy
