"""vLLM as a rollout engine, in the process of the trainer."""

import gc
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rft_dist import RolloutGroups
from rft_engines.config import EngineConfig
from rft_engines.contract import WEIGHTS, SleepContract, SleepLevel, sleep_contract
from rft_engines.end_tokens import end_token_ids
from rft_engines.errors import EngineDiedError, UnsupportedCombinationError
from rft_engines.generation import FinishReason, Generation, GenerationRequest, sample_id
from rft_engines.isolation import environment_variables, preserved_random_state
from rft_engines.lifecycle import ManagedEngine
from rft_engines.memory import cuda_memory_in_use
from rft_engines.sampling import SamplingParams
from rft_engines.seeds import request_seed, sample_seed
from rft_engines.vllm.arguments import LOWEST_TEMPERATURE, engine_arguments, engine_environment
from rft_engines.vllm.held import read_memory
from rft_engines.vllm.shutdown import kept_process_group
from rft_engines.vllm.stepping import CoreStepper, StepOutput, Stepper, TextStepper

logger = logging.getLogger(__name__)


@dataclass
class _Partial:
    """A sample while vLLM works on it."""

    request: GenerationRequest
    place: int
    sample_index: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ABORT


class VLLMEngine(ManagedEngine):
    """Generates with vLLM in this process.

    With a process group, each rank holds the part of the engine that its place in the TP group gives it, TP groups
    being consecutive ranks as in `ParallelLayout`. All ranks of a TP group must bring the same requests:
    `gather_and_generate` sees to that. Every sample is sent as a request with a seed of its own, so that neither
    batching nor the process's random state decides a token; the prefix cache shares the prompt between the samples.
    """

    def __init__(self, config: EngineConfig, *, groups: RolloutGroups | None = None) -> None:
        """Build the engine. Collective over the world: vLLM agrees on the size of the KV cache over all ranks.

        Raises:
            MissingExtraError: vLLM is not installed (raised by `create_engine`).
        """
        super().__init__(weights_loaded=config.load_weights)
        from vllm import LLM
        from vllm.platforms import current_platform

        self._on_cpu = current_platform.is_cpu()
        self._sleep_mode = config.enable_sleep and not self._on_cpu
        self._may_sleep = config.enable_sleep or self._on_cpu
        self._seed = groups.layout.engine_seed(config.seed) if groups is not None else config.seed or 0
        self._shares_process_group = dist.is_initialized()
        launched = self._shares_process_group or "RANK" in os.environ
        arguments = engine_arguments(config, seed=self._seed, launched=launched, on_cpu=self._on_cpu)
        with preserved_random_state(), environment_variables(engine_environment(on_cpu=self._on_cpu)):
            self._llm: Any = LLM(**arguments)
        self._contract = sleep_contract("vllm")
        model_config = self._llm.llm_engine.model_config
        self._max_model_len = int(model_config.max_model_len)
        self._vocab_size = int(model_config.hf_text_config.vocab_size)
        self._takes_images = bool(model_config.is_multimodal_model)
        tokenizer = None if arguments.get("skip_tokenizer_init") else self._llm.get_tokenizer()
        self._has_tokenizer = tokenizer is not None
        further = SimpleNamespace(**model_config.try_get_generation_config())
        self._eos = end_token_ids(model_config.hf_text_config, tokenizer, further)
        self._calls = 0
        self._adapter: Any = None
        self._live: dict[str, _Partial] = {}
        self._stepper: Stepper = CoreStepper(self._llm.llm_engine)

    @property
    def contract(self) -> SleepContract:
        """See `RolloutEngine`."""
        return self._contract

    @property
    def native(self) -> Any:
        """The `vllm.LLM`."""
        return self._llm

    def use_adapter(self, adapter: Any) -> None:
        """Generate with this `LoRARequest`, which a weight update has loaded, from now on; without one for None."""
        self._adapter = adapter

    def _native_sampling(self, sampling: SamplingParams, budget: int, seed: int) -> Any:
        from vllm import SamplingParams as NativeSampling
        from vllm.sampling_params import RequestOutputKind

        stop_ids = list(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.extend(token for token in self._eos if token not in stop_ids)
        return NativeSampling(
            n=1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=budget,
            seed=seed,
            stop=list(sampling.stop) or None,
            stop_token_ids=stop_ids,
            ignore_eos=sampling.ignore_eos,
            # Number of likeliest tokens beside the sampled one.
            logprobs=0,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _submit(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[_Partial]:
        partials = []
        call, self._calls = self._calls, self._calls + 1
        for place, request in enumerate(requests):
            seed = request.seed if request.seed is not None else request_seed(self._seed, call, place)
            budget = request.token_budget(sampling, self._max_model_len)
            prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_token_ids)}
            if request.images:
                prompt["multi_modal_data"] = {"image": list(request.images)}
            for index in range(sampling.n):
                partial = _Partial(request, place, index)
                native = self._native_sampling(sampling, budget, sample_seed(seed, index))
                self._live[self._stepper.submit(f"{call}-{place}-{index}", prompt, native, self._adapter)] = partial
                partials.append(partial)
        return partials

    def _generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, max_steps: int | None
    ) -> list[Generation]:
        sampling.refuse_first_token_temperature("vllm")
        sampling.refuse_temperature_below(LOWEST_TEMPERATURE, "vllm")
        if sampling.stop and not self._has_tokenizer:
            raise ValueError(f"SamplingParams.stop={sampling.stop} needs text, and the model folder has no tokenizer")
        engine = self._llm.llm_engine
        needs_text = bool(sampling.stop) or any(request.images for request in requests)
        self._stepper = TextStepper(engine) if needs_text else CoreStepper(engine)
        with preserved_random_state():
            partials = self._submit(requests, sampling)
            unfinished = len(partials)
            steps = 0
            # Every rank of a TP group counts the same steps; abort() must be called on all of them.
            while unfinished and steps != max_steps and not self._aborted.is_set():
                outputs = list(self._stepper.step())
                unfinished -= sum(self._take(output) for output in outputs)
                # With overlapped scheduling a step may only start work that a later one reports.
                steps += bool(outputs)
        self._discard_unfinished()
        return [self._generation(partial, sampling) for partial in partials]

    def _take(self, output: StepOutput) -> bool:
        """Append one step's tokens to their sample; whether it has ended."""
        partial = self._live.get(output.key)
        # A step that overlapped with the end of an earlier call may still report a sample of that call.
        if partial is None:
            return False
        partial.tokens.extend(output.token_ids)
        partial.log_probs.extend(output.log_probs)
        if output.prompt_token_ids and partial.request.images:
            # vLLM replaces each placeholder by as many ids as the picture takes.
            partial.request = replace(partial.request, prompt_token_ids=tuple(output.prompt_token_ids))
        if output.finish_reason is None:
            return False
        if output.finish_reason not in ("stop", "length"):
            raise EngineDiedError(
                f"vLLM ended a request with finish reason {output.finish_reason!r} ({output.stop_reason!r}) that "
                f"nobody asked for: its log says why; generate again, or close() this engine and create a new one"
            )
        partial.finish_reason = FinishReason(output.finish_reason)
        return True

    def _generation(self, partial: _Partial, sampling: SamplingParams) -> Generation:
        return Generation(
            request_id=sample_id(partial.request, partial.place),
            sample_index=partial.sample_index,
            prompt_token_ids=partial.request.prompt_token_ids,
            token_ids=tuple(partial.tokens),
            log_probs=tuple(partial.log_probs),
            finish_reason=partial.finish_reason,
            weights_version=self.weights_version,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )

    def _discard_unfinished(self) -> None:
        keys = list(self._live)
        self._live.clear()
        if keys:
            self._stepper.drop(keys)

    def _release(self, level: SleepLevel) -> None:
        if not self._may_sleep:
            raise UnsupportedCombinationError(
                "engine 'vllm' built with enable_sleep=False and sleep: set EngineConfig.enable_sleep=True"
            )
        if self._sleep_mode:
            self._llm.sleep(level=int(level))
        elif self._on_cpu:
            # The states are kept, so that a program behaves alike on both; nothing can be freed.
            self._drop_caches()

    def _restore(self, tags: Sequence[str]) -> None:
        if self._sleep_mode:
            for tag in tags:
                self._llm.wake_up(tags=[tag])

    def _held(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        self._llm.collective_rpc(partial(read_memory, found))
        return found

    def _memory_in_use(self) -> Mapping[str, int]:
        if not self._sleep_mode:
            return {}
        from vllm.device_allocator.cumem import CuMemAllocator

        # Weights and KV cache lie in a pool that torch goes on counting when the memory behind it is given back.
        return cuda_memory_in_use(given_back=CuMemAllocator.get_instance().get_current_usage())

    def _drop_caches(self) -> bool:
        engine = self._llm.llm_engine
        # Encoder outputs and preprocessed pictures depend on the weights, too.
        if hasattr(engine, "reset_encoder_cache"):
            engine.reset_encoder_cache()
        return bool(self._llm.reset_prefix_cache())

    def _shut_down(self) -> None:
        if self._sleep_mode and WEIGHTS not in self._awake:
            self._llm.wake_up()
        with kept_process_group() if self._shares_process_group else nullcontext():
            self._llm.llm_engine.engine_core.shutdown()
        # The stepper holds the engine, too.
        del self._llm, self._stepper
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
