"""The state machine every engine of this package shares."""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rft_engines.contract import CUDA_GRAPHS, KV_CACHE, WEIGHTS, Fate, SleepContract, SleepLevel
from rft_engines.counts import is_count
from rft_engines.errors import EngineStateError, UnsupportedCombinationError
from rft_engines.generation import Generation, GenerationRequest, check_requests
from rft_engines.memory import SleepMemory
from rft_engines.protocol import EngineState
from rft_engines.sampling import SamplingParams

logger = logging.getLogger(__name__)

_TAGS = (WEIGHTS, KV_CACHE)


class ManagedEngine(ABC):
    """Base for adapters: keeps the states, leaves the engine's own calls to hooks.

    A subclass gives `contract`, `native`, `_generate`, `_release`, `_restore`, `_drop_caches` and `_shut_down`;
    `_abort_running` where `_generate` cannot look at `_aborted`; `_discard_unfinished` where a failed call leaves
    requests behind.
    The hooks are called in permitted states only.
    Its constructor sets `_max_model_len`, `_vocab_size` and `_eos`, and `_takes_images` where it is known to be false.
    """

    def __init__(self, *, weights_loaded: bool = True) -> None:
        self._slept_at: SleepLevel | None = None
        self._awake: set[str] = {WEIGHTS, KV_CACHE}
        self._weights_defined = weights_loaded
        self._undefined_because = "" if weights_loaded else "the engine was started without loading a checkpoint"
        self._updating = False
        self._closed = False
        self._version = 0
        self._running = threading.Lock()
        self._running_requests = 0
        # An abort is for the call that runs now: count and flag change together.
        self._counting = threading.Lock()
        self._aborted = threading.Event()
        self._logged_sampling: set[tuple[float, float, int]] = set()
        self.sleep_memory = SleepMemory()

    # What a subclass gives.

    @property
    @abstractmethod
    def contract(self) -> SleepContract:
        """See `RolloutEngine`."""

    @property
    @abstractmethod
    def native(self) -> Any:
        """See `RolloutEngine`."""

    _max_model_len: int | None = None
    _vocab_size: int | None = None
    _eos: tuple[int, ...] = ()
    _takes_images: bool = True

    @property
    def max_model_len(self) -> int | None:
        """See `RolloutEngine`."""
        return self._max_model_len

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding table that a prompt may use, None when unknown."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sample unless `ignore_eos` is set."""
        return self._eos

    @abstractmethod
    def _generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, max_steps: int | None
    ) -> list[Generation]:
        """Samples in request order. Returns partial ones soon after `_aborted` was set in another thread."""

    def _abort_running(self) -> None:  # noqa: B027 - most engines look at `_aborted`
        """Interrupt the `_generate` that runs in another thread."""

    def _discard_unfinished(self) -> None:  # noqa: B027 - most engines leave nothing behind
        """Drop the requests that a failed `_generate` left in the engine."""

    @abstractmethod
    def _release(self, level: SleepLevel) -> None:
        """Go to sleep from a fully awake state."""

    @abstractmethod
    def _restore(self, tags: Sequence[str]) -> None:
        """Bring back tags that sleep."""

    @abstractmethod
    def _drop_caches(self) -> bool:
        """Forget everything computed with earlier weights."""

    @abstractmethod
    def _shut_down(self) -> None:
        """Give everything back."""

    def _memory_in_use(self) -> Mapping[str, int]:
        """Bytes in use by owner, measured while asleep; empty where the engine cannot tell."""
        return {}

    def _held(self) -> Mapping[str, int]:
        """Device bytes by kind of memory while nothing sleeps; kinds that the engine cannot tell are left out."""
        return {}

    def memory(self) -> dict[str, int]:
        """Device bytes by kind (weights, kv_cache, cuda_graphs) in the present state; unknown kinds are left out.

        A cache that lives only inside `generate` counts with the most it reached since the last call of this. On a CPU
        a kind that sleeps counts as gone, although nothing is freed there.
        """
        if self._closed:
            return {}
        held = dict(self._held())
        if self._slept_at is None:
            return held
        effect = self.contract.effect(self._slept_at)
        fates = {WEIGHTS: effect.weights, KV_CACHE: effect.kv_cache, CUDA_GRAPHS: effect.cuda_graphs}
        # Graphs come back with the cache whose addresses they hold.
        awake = self._awake | ({CUDA_GRAPHS} if KV_CACHE in self._awake else set())
        return {kind: size if kind in awake or fates[kind] is Fate.KEPT else 0 for kind, size in held.items()}

    # States.

    @property
    def weights_version(self) -> int:
        """See `RolloutEngine`."""
        return self._version

    @property
    def state(self) -> EngineState:
        """See `RolloutEngine`."""
        if self._closed:
            return EngineState.CLOSED
        if self._updating:
            return EngineState.UPDATING
        if WEIGHTS not in self._awake:
            return EngineState.ASLEEP
        if KV_CACHE not in self._awake:
            return EngineState.WEIGHTS_AWAKE
        return EngineState.READY if self._weights_defined else EngineState.WEIGHTS_UNDEFINED

    @property
    def weights_defined(self) -> bool:
        """Whether the engine has valid weights, asleep or awake; `state` says it of an engine that is awake only."""
        return self._weights_defined

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise EngineStateError(f"{call} on a closed engine: create a new one")

    def _require_ready(self) -> None:
        state = self.state
        if state is EngineState.READY:
            return
        remedy = {
            EngineState.CLOSED: "the engine is closed: create a new one",
            EngineState.UPDATING: "a weight update is open: call finish_weight_update(version) first",
            EngineState.ASLEEP: "the engine is asleep: call wake_up() first",
            EngineState.WEIGHTS_AWAKE: 'only the weights are awake: call wake_up(["kv_cache"]) first',
            EngineState.WEIGHTS_UNDEFINED: f"the weights are undefined ({self._undefined_because}): run a full weight "
            f"update and finish_weight_update(version) first",
        }
        raise EngineStateError(f"generate refused, {remedy[state]}")

    # Generation.

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, *, max_steps: int | None = None
    ) -> list[Generation]:
        """See `RolloutEngine`."""
        self._require_ready()
        if max_steps is not None and not is_count(max_steps):
            raise ValueError(f"max_steps={max_steps!r}: give an integer of at least 1, or None for no step budget")
        check_requests(requests, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        if not self._takes_images and any(request.images for request in requests):
            raise UnsupportedCombinationError(
                f"engine {self.contract.engine!r} and images: its model takes text only, send requests without images "
                f"or build the engine on a vision-language model"
            )
        if not self._running.acquire(blocking=False):
            raise EngineStateError("generate refused, another generate call is running: wait for it or call abort()")
        try:
            self._count_running(len(requests))
            self._log_sampling(sampling)
            samples = self._generate(requests, sampling, max_steps) if requests else []
        except BaseException:
            # The engine must hold no request of the failed call: the next one would get its answers.
            self._discard_unfinished()
            raise
        finally:
            self._count_running(0)
            self._running.release()
        assert len(samples) == len(requests) * sampling.n, (len(samples), len(requests), sampling.n)
        return samples

    def _count_running(self, requests: int) -> None:
        with self._counting:
            self._running_requests = requests
            self._aborted.clear()

    def _log_sampling(self, sampling: SamplingParams) -> None:
        facts = (sampling.temperature, sampling.top_p, sampling.top_k)
        if facts not in self._logged_sampling:
            self._logged_sampling.add(facts)
            logger.info(
                "engine %s samples with temperature=%s top_p=%s top_k=%s, no penalties", self.contract.engine, *facts
            )

    def abort(self) -> int:
        """See `RolloutEngine`."""
        with self._counting:
            count = self._running_requests
            if count:
                self._aborted.set()
        if count:
            self._abort_running()
            logger.warning("engine %s aborted %d unfinished requests", self.contract.engine, count)
        return count

    # Sleep.

    def sleep(self, level: int | None = None) -> int:
        """See `RolloutEngine`."""
        self._require_open("sleep")
        wanted = self.contract.level(level)
        if self._updating:
            raise EngineStateError("sleep refused, a weight update is open: finish or abort it first")
        if self._slept_at is not None and WEIGHTS not in self._awake:
            if wanted > self._slept_at:
                raise EngineStateError(
                    f"sleep({wanted}) refused, asleep at level {self._slept_at}: call wake_up() first"
                )
            return 0
        aborted = self.abort()
        with self._running:
            if self._slept_at is not None:
                # Half awake: the release hooks start from a fully awake engine.
                self._restore([tag for tag in _TAGS if tag not in self._awake])
            self._release(wanted)
        self._slept_at = wanted
        self._awake = set()
        in_use = self._memory_in_use()
        if in_use:
            self.sleep_memory.record(in_use)
        if self.contract.effect(wanted).weights is Fate.UNDEFINED:
            self._weights_defined = False
            self._undefined_because = f"sleep({wanted}) dropped them"
        return aborted

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `RolloutEngine`."""
        self._require_open("wake_up")
        if isinstance(tags, str):
            raise ValueError(f"wake_up tags={tags!r} is one string: give a list, such as [{tags!r}]")  # noqa: TRY004
        wanted = list(_TAGS) if tags is None else list(tags)
        unknown = [tag for tag in wanted if tag not in _TAGS]
        if unknown:
            raise ValueError(f"wake_up tags {unknown} are unknown: give a part of {list(_TAGS)}, or None for all")
        if KV_CACHE in wanted and WEIGHTS not in wanted and WEIGHTS not in self._awake:
            raise EngineStateError('wake_up(["kv_cache"]) refused, the weights sleep: call wake_up(["weights"]) first')
        # Weights first: the memory for both at once may not be there before a sync has freed its buckets.
        sleeping = [tag for tag in _TAGS if tag in wanted and tag not in self._awake]
        if sleeping:
            self._restore(sleeping)
            self._awake.update(sleeping)
        if self._awake == set(_TAGS):
            self._slept_at = None

    def reset_prefix_cache(self) -> bool:
        """See `RolloutEngine`."""
        self._require_open("reset_prefix_cache")
        return self._drop_caches() if KV_CACHE in self._awake else True

    # Weight updates.

    def begin_weight_update(self) -> None:
        """See `RolloutEngine`."""
        self._require_open("begin_weight_update")
        if self._updating:
            raise EngineStateError("begin_weight_update refused, an update is open: finish or abort it first")
        self.abort()
        with self._running:
            self.wake_up([WEIGHTS])
            self._updating = True

    def finish_weight_update(self, version: int) -> None:
        """See `RolloutEngine`."""
        self._require_open("finish_weight_update")
        if not self._updating:
            raise EngineStateError("finish_weight_update refused, no update is open: call begin_weight_update() first")
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ValueError(
                f"finish_weight_update version={version!r}: give the number of finished updates, 0 or above"
            )
        if not self.reset_prefix_cache():
            raise EngineStateError(
                "finish_weight_update refused, the engine kept prefixes computed with the old weights: requests are "
                "still running, call abort() first"
            )
        self._updating = False
        self._weights_defined = True
        self._undefined_because = ""
        self._version = version

    def cancel_weight_update(self) -> None:
        """Close an update that was refused before anything was written: the weights are what they were before it.

        Raises:
            EngineStateError: No update is open.
        """
        self._require_open("cancel_weight_update")
        if not self._updating:
            raise EngineStateError("cancel_weight_update refused, no update is open: call begin_weight_update() first")
        self._updating = False

    def abort_weight_update(self, reason: str) -> None:
        """See `RolloutEngine`."""
        self._require_open("abort_weight_update")
        if not self._updating:
            raise EngineStateError("abort_weight_update refused, no update is open: call begin_weight_update() first")
        self._updating = False
        self._weights_defined = False
        self._undefined_because = f"a weight update failed: {reason}"

    def close(self) -> None:
        """See `RolloutEngine`."""
        if self._closed:
            return
        self.abort()
        with self._running:
            self._closed = True
            self._shut_down()
