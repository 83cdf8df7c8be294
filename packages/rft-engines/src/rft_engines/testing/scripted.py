"""An engine without a model: a function gives the logits of each next token."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from rft_engines.contract import SleepContract, SleepLevel, sleep_contract
from rft_engines.generation import Generation, GenerationRequest, sample_id
from rft_engines.hf.rows import Row, StepBudget
from rft_engines.hf.sampler import choose_tokens
from rft_engines.hf.stops import StopRules
from rft_engines.lifecycle import ManagedEngine
from rft_engines.sampling import SamplingParams
from rft_engines.seeds import UniformStream, request_seed, sample_seed

Logits = Callable[[GenerationRequest, int, tuple[int, ...]], Sequence[float]]
"""(request, sample index, tokens so far) -> logits [V] of the next token."""

_SURE = 30.0


class ScriptedEngine(ManagedEngine):
    """Samples from scripted logits, with the states, seeds and stop rules of a real engine.

    `calls` lists the requests and sampling of every generate call. `events` lists what the lifecycle did, such as
    "release 1", "restore weights", "drop caches".
    """

    def __init__(
        self,
        logits: Logits,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        max_model_len: int | None = None,
        tokenizer: Any = None,
        native: Any = None,
        contract: SleepContract | None = None,
        seed: int = 0,
        seconds_per_step: float = 0.0,
        weights_loaded: bool = True,
    ) -> None:
        super().__init__(weights_loaded=weights_loaded)
        self._logits = logits
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._native = native
        self._contract = contract if contract is not None else sleep_contract("hf")
        self._seed = seed
        self._seconds_per_step = seconds_per_step
        self.calls: list[tuple[tuple[GenerationRequest, ...], SamplingParams]] = []
        self.events: list[str] = []

    @classmethod
    def answering(
        cls,
        answers: Mapping[tuple[int, ...], Sequence[int]] | Callable[[GenerationRequest, int], Sequence[int]],
        *,
        vocab_size: int,
        eos_token_id: int,
        **options: Any,
    ) -> Self:
        """An engine that gives the answer scripted for each prompt (or request and sample), then the end id."""

        def logits(request: GenerationRequest, sample_index: int, tokens: tuple[int, ...]) -> Sequence[float]:
            answer = answers(request, sample_index) if callable(answers) else answers[request.prompt_token_ids]
            scores = [0.0] * vocab_size
            scores[answer[len(tokens)] if len(tokens) < len(answer) else eos_token_id] = _SURE
            return scores

        return cls(logits, vocab_size=vocab_size, eos_token_ids=(eos_token_id,), **options)

    @property
    def contract(self) -> SleepContract:
        """The contract given, else that of the embedded engine."""
        return self._contract

    @property
    def native(self) -> Any:
        """What was given as `native`."""
        return self._native

    def _generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, max_steps: int | None
    ) -> list[Generation]:
        stops = StopRules(sampling, eos_token_ids=self._eos, tokenizer=self._tokenizer)
        samples: list[tuple[GenerationRequest, Row]] = []
        for place, request in enumerate(requests):
            seed = request.seed if request.seed is not None else request_seed(self._seed, len(self.calls), place)
            budget = request.token_budget(sampling, self._max_model_len)
            for index in range(sampling.n):
                stream = UniformStream(sample_seed(seed, index))
                samples.append((request, Row(place, index, request.prompt_token_ids, budget, stream)))
        self.calls.append((tuple(requests), sampling))
        steps = StepBudget(max_steps, self._aborted.is_set)
        active = samples
        while active and not steps.spent():
            time.sleep(self._seconds_per_step)
            self._step(active, sampling, stops)
            active = [(request, row) for request, row in active if row.finish_reason is None]
        return [
            row.generation(sample_id(request, row.place), sampling, self.weights_version) for request, row in samples
        ]

    def _step(
        self, active: Sequence[tuple[GenerationRequest, Row]], sampling: SamplingParams, stops: StopRules
    ) -> None:
        scripted = [self._logits(request, row.sample_index, tuple(row.tokens)) for request, row in active]
        uniforms = torch.tensor([row.stream.at(len(row.tokens)) for _, row in active], dtype=torch.float64)
        tokens, log_probs = choose_tokens(torch.tensor(scripted, dtype=torch.float32), uniforms, sampling)
        for (_, row), token, log_prob in zip(active, tokens.tolist(), log_probs.tolist(), strict=True):
            row.take(token, log_prob, stops)

    def _release(self, level: SleepLevel) -> None:
        self.events.append(f"release {int(level)}")

    def _restore(self, tags: Sequence[str]) -> None:
        self.events.extend(f"restore {tag}" for tag in tags)

    def _drop_caches(self) -> bool:
        self.events.append("drop caches")
        return True

    def _shut_down(self) -> None:
        self.events.append("shut down")
