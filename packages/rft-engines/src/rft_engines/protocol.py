"""The contract between rollout code and an engine."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from rft_engines.contract import SleepContract
from rft_engines.generation import Generation, GenerationRequest
from rft_engines.sampling import SamplingParams


class EngineState(StrEnum):
    """What an engine can be asked to do."""

    READY = "ready"
    """Generates."""
    ASLEEP = "asleep"
    """`wake_up()`, or `wake_up(["weights"])` before a weight update."""
    WEIGHTS_AWAKE = "weights_awake"
    """The weights are resident, the KV cache is not: update them, then `wake_up(["kv_cache"])`."""
    UPDATING = "updating"
    """A weight update is open."""
    WEIGHTS_UNDEFINED = "weights_undefined"
    """Awake without valid weights: run a full weight update."""
    CLOSED = "closed"
    """`close()` was called."""


@runtime_checkable
class RolloutEngine(Protocol):
    """An inference engine that lives in, or is owned by, a training process.

    Who calls what: rollout code calls `generate`; the owner of the phases calls `sleep` and `wake_up`; whoever writes
    weights into `native` does it between `begin_weight_update` and `finish_weight_update`. One thread generates at a
    time; `abort` and `sleep` may come from another.
    """

    @property
    def state(self) -> EngineState:
        """Present state."""
        ...

    @property
    def contract(self) -> SleepContract:
        """What each sleep level does to weights, KV cache and CUDA graphs."""
        ...

    @property
    def native(self) -> Any:
        """The raw engine, for whoever writes weights into it."""
        ...

    @property
    def weights_version(self) -> int:
        """Version given to the last finished update; 0 for the weights the engine started with."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt and response together, None when unlimited."""
        ...

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, *, max_steps: int | None = None
    ) -> list[Generation]:
        """Samples in the order A0 A1 B0 B1 for n=2 and requests A, B.

        `max_steps` is the step budget: samples that need more decoding steps come back partial with reason abort.

        Raises:
            EngineStateError: asleep, weights undefined, update open, closed, or already generating.
            InvalidRequestError: a request the engine cannot serve; nothing has run.
        """
        ...

    def abort(self) -> int:
        """End the running generate call, which returns partial samples; the number of requests aborted."""
        ...

    def sleep(self, level: int | None = None) -> int:
        """Release memory as `contract.effect(level)` says; the number of unfinished requests aborted. Idempotent."""
        ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back "weights", "kv_cache", or both (None). Idempotent."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; True when the cache is empty afterwards, a safe no-op while it is released."""
        ...

    def begin_weight_update(self) -> None:
        """Open an update: aborts what runs, wakes sleeping weights, refuses generate until it is finished."""
        ...

    def finish_weight_update(self, version: int) -> None:
        """Close the update: caches that depend on the old weights are dropped, `weights_version` becomes `version`."""
        ...

    def abort_weight_update(self, reason: str) -> None:
        """Close a failed update: the weights are undefined until an update is finished."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...
