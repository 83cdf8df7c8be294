"""SGLang as a rollout engine: the leader of each TP group owns it, the peers receive its answers."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rft_dist import RolloutGroups, raise_together
from rft_engines.config import EngineConfig
from rft_engines.contract import KV_CACHE, WEIGHTS, Fate, SleepContract, SleepLevel, sleep_contract
from rft_engines.errors import EngineDiedError, EngineStateError, UnsupportedCombinationError
from rft_engines.generation import Generation, GenerationRequest, sample_id
from rft_engines.lifecycle import ManagedEngine
from rft_engines.memory import cuda_memory_in_use
from rft_engines.sampling import SamplingParams
from rft_engines.seeds import request_seed, sample_seed
from rft_engines.sglang.arguments import (
    cut_at_stop,
    engine_arguments,
    finish_reason,
    has_tokenizer,
    model_facts,
    native_sampling,
    refuse_unsupported,
)
from rft_engines.sglang.process import EngineProcess

T = TypeVar("T")

logger = logging.getLogger(__name__)

_CUDA_GRAPH_TAG = "cuda_graph"
_IDLE_SECONDS = 10.0


class SGLangEngine(ManagedEngine):
    """Generates with an SGLang engine in processes of its own.

    The first rank of a TP group owns the engine (`native`), the others hold None and take part in the collectives of
    every call: construction, `generate`, `sleep`, `wake_up`, `reset_prefix_cache` and the weight-update session are
    collective over `groups.tp_cpu`; `abort` and `close` are local.

    Seeds of requests hold only with options={"enable_deterministic_inference": True}; SGLang ignores them otherwise.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        groups: RolloutGroups | None = None,
        engine_class: Callable[..., Any] | None = None,
    ) -> None:
        """Start the engine on the leader. Collective over `groups.tp_cpu`.

        Args:
            config: the engine's config.
            groups: the TP groups; None for a single process.
            engine_class: what stands in for `sglang.Engine`; for tests.

        Raises:
            EngineStartError: it did not start; on every rank of the group.
        """
        super().__init__(weights_loaded=config.load_weights)
        self._group = groups.tp_cpu if groups is not None and groups.layout.engine_tp_size > 1 else None
        self._leads = groups is None or groups.layout.tp_rank == 0
        self._seed = groups.layout.engine_seed(config.seed) if groups is not None else config.seed or 0
        self._contract = sleep_contract("sglang")
        self._may_sleep = config.enable_sleep
        self._tokenizer = has_tokenizer(config.model_path)
        facts = model_facts(config.model_path)
        self._vocab_size = facts.vocab_size
        self._takes_images = facts.takes_images
        self._eos = facts.eos_token_ids
        self._calls = 0
        self._released: set[str] = set()
        self._process: EngineProcess | None = None
        room: int | None = None
        error: Exception | None = None
        if self._leads:
            try:
                self._process = self._started(config, facts.max_position_embeddings, engine_class)
                room = self._room(config.max_model_len)
            except Exception as failure:  # noqa: BLE001 - raised on all ranks below
                error = failure
        self._raise_together(error)
        self._max_model_len = self._shared(room)

    def _room(self, wanted: int | None) -> int:
        """Most tokens of prompt and response: what is wanted, as far as the engine has room for it."""
        # A prompt must be shorter than this, and it is below the room for prompt and response.
        room = int(self.native.tokenizer_manager.max_req_input_len)
        if wanted is not None and wanted > room:
            logger.warning(
                "engine sglang takes %d tokens of prompt and response, %d were asked for: the context or the KV cache "
                "(max_total_tokens) holds no more",
                room, wanted,
            )  # fmt: skip
        return room if wanted is None else min(room, wanted)

    def _started(
        self, config: EngineConfig, positions: int | None, engine_class: Callable[..., Any] | None
    ) -> EngineProcess:
        if engine_class is None:
            from sglang import Engine

            engine_class = Engine
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        arguments = engine_arguments(config, seed=self._seed, base_gpu_id=device, positions=positions)
        return EngineProcess(engine_class, arguments)

    @property
    def contract(self) -> SleepContract:
        """See `RolloutEngine`."""
        return self._contract

    @property
    def native(self) -> Any:
        """The `sglang.Engine` on the leader, None on its peers."""
        return self._process.engine if self._process is not None else None

    # The leader calls, all ranks learn how it went.

    def _raise_together(self, error: Exception | None) -> None:
        if self._group is None:
            if error is not None:
                raise error
            return
        raise_together(error, self._group)

    def _on_leader(self, run: Callable[[Any], T]) -> T | None:
        """`run(engine)` on the leader; None on its peers. Collective over the TP group."""
        result: T | None = None
        error: Exception | None = None
        if self._process is not None:
            try:
                result = self._process.call(run)
            except Exception as failure:  # noqa: BLE001 - raised on all ranks below
                error = failure
        self._raise_together(error)
        return result

    def _shared(self, value: T | None) -> T:
        """The leader's value on every rank. Collective over the TP group."""
        box = [value]
        if self._group is not None:
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        assert box[0] is not None
        return box[0]

    # Hooks.

    def _generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, max_steps: int | None
    ) -> list[Generation]:
        """Collective over the TP group."""
        refuse_unsupported(sampling, max_steps, tokenizer=self._tokenizer)
        arguments = self._native_call(requests, sampling)
        self._calls += 1
        answers = self._on_leader(lambda engine: engine.generate(**arguments))
        samples: list[Generation] | None = None
        error: Exception | None = None
        if answers is not None:
            try:
                samples = self._read(requests, sampling, answers)
            except Exception as failure:  # noqa: BLE001 - raised on all ranks below
                error = failure
        self._raise_together(error)
        return self._shared(samples)

    def _native_call(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> dict[str, Any]:
        """Arguments of `sglang.Engine.generate`: every sample is a prompt with a seed of its own."""
        prompts: list[list[int]] = []
        parameters: list[dict[str, Any]] = []
        for place, request in enumerate(requests):
            seed = request.seed if request.seed is not None else request_seed(self._seed, self._calls, place)
            budget = request.token_budget(sampling, self._max_model_len)
            for index in range(sampling.n):
                prompts.append(list(request.prompt_token_ids))
                parameters.append(native_sampling(sampling, budget, sample_seed(seed, index)))
        images = [list(request.images) or None for request in requests for _ in range(sampling.n)]
        return {
            "input_ids": prompts,
            "sampling_params": parameters,
            "image_data": images if any(images) else None,
            "return_logprob": True,
        }

    def _read(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, answers: Sequence[Any]
    ) -> list[Generation]:
        if len(answers) != len(requests) * sampling.n:
            raise EngineDiedError(f"SGLang returned {len(answers)} samples for {len(requests)} x {sampling.n}")
        samples = []
        for number, answer in enumerate(answers):
            place, index = divmod(number, sampling.n)
            request = requests[place]
            # (log-probability, token id, text) of each sampled token.
            steps = answer["meta_info"].get("output_token_logprobs") or ()
            tokens, reason = cut_at_stop([int(step[1]) for step in steps], finish_reason(answer["meta_info"]), sampling)
            samples.append(
                Generation(
                    request_id=sample_id(request, place),
                    sample_index=index,
                    prompt_token_ids=request.prompt_token_ids,
                    token_ids=tuple(tokens),
                    log_probs=tuple(float(step[0]) for step in steps[: len(tokens)]),
                    finish_reason=reason,
                    weights_version=self.weights_version,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                )
            )
        return samples

    def _abort_running(self) -> None:
        if self._process is not None:
            self._process.abort_all()

    def _release(self, level: SleepLevel) -> None:
        """Collective over the TP group."""
        if not self._may_sleep:
            raise UnsupportedCombinationError(
                "engine 'sglang' built with enable_sleep=False and sleep: set EngineConfig.enable_sleep=True"
            )
        if not self._drop_caches():
            raise EngineStateError("sleep refused, SGLang still works on requests: call abort() first")
        tags = [KV_CACHE, _CUDA_GRAPH_TAG]
        if self._contract.effect(level).weights is not Fate.KEPT:
            tags.append(WEIGHTS)
        self._on_leader(lambda engine: engine.release_memory_occupation(tags=tags))
        self._released.update(tags)

    def _restore(self, tags: Sequence[str]) -> None:
        """Collective over the TP group. SGLang fails on a tag that was not released, so each is remembered."""
        for tag in tags:
            # Graphs hold addresses of the KV cache: they come back with it.
            native = [name for name in (tag, *([_CUDA_GRAPH_TAG] if tag == KV_CACHE else [])) if name in self._released]
            if native:
                self._on_leader(partial(_resume, native))
                self._released.difference_update(native)

    def _memory_in_use(self) -> Mapping[str, int]:
        # The engine's own processes are "outside torch" here. Each rank reads its own device.
        return cuda_memory_in_use() if torch.cuda.is_available() else {}

    def _drop_caches(self) -> bool:
        """Collective over the TP group. Afterwards SGLang's scheduler is idle, which sleep needs."""
        if self._running_requests:
            return False
        return self._shared(self._on_leader(_flush))

    def _shut_down(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None


def _flush(engine: Any) -> bool:
    """Empty the prefix cache. The scheduler answers before it has put its last batch away, so it may need a moment."""
    deadline = time.monotonic() + _IDLE_SECONDS
    while True:
        answer = engine.flush_cache()
        flushed = bool(getattr(answer, "success", answer))
        if flushed or time.monotonic() > deadline:
            return flushed
        time.sleep(0.02)


def _resume(tags: list[str], engine: Any) -> None:
    engine.resume_memory_occupation(tags=tags)
