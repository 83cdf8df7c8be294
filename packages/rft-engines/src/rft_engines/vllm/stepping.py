"""Submitting samples to vLLM's engine and reading what each of its steps made."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from rft_engines.answers import sampled_log_prob
from rft_engines.errors import MissingLogProbError


class StepOutput(NamedTuple):
    """What one step added to one sample. Made for every token of every sample, so a tuple.

    Attributes:
        key: of the sample, as `Stepper.submit` returned it.
        token_ids: new ids, in order.
        log_probs: one for each new id.
        finish_reason: vLLM's word ("stop", "length", ...), None while the sample goes on.
        stop_reason: what else vLLM says about the end.
        prompt_token_ids: the prompt as vLLM saw it, where it may differ from what was sent; else None.
    """

    key: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str | None
    stop_reason: Any
    prompt_token_ids: Sequence[int] | None = None


class Stepper(Protocol):
    """One way of driving `vllm.v1.engine.llm_engine.LLMEngine`, for the length of one generate call."""

    def submit(self, name: str, prompt: dict[str, Any], sampling: Any, adapter: Any = None) -> str:
        """Queue one sample, under a LoRARequest where one is given; the key its outputs and `drop` go by."""
        ...

    def step(self) -> Iterator[StepOutput]:
        """Run one engine step."""
        ...

    def drop(self, keys: Sequence[str]) -> None:
        """Forget samples, finished or not."""
        ...


class CoreStepper:
    """Reads the engine core's own output: ids and numbers, nothing detokenised, no object for each token.

    The core knows nothing of stop strings and of prompts widened by pictures. Calls that need these go through
    `TextStepper`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def submit(self, name: str, prompt: dict[str, Any], sampling: Any, adapter: Any = None) -> str:
        """See `Stepper`; the key is vLLM's internal id."""
        return str(self._engine.add_request(name, prompt, sampling, lora_request=adapter))

    def step(self) -> Iterator[StepOutput]:
        """See `Stepper`."""
        for output in self._engine.engine_core.get_output().outputs:
            tokens = output.new_token_ids
            reason = output.finish_reason
            yield StepOutput(
                output.request_id,
                tokens,
                _core_log_probs(output.new_logprobs, tokens),
                None if reason is None else str(reason),
                output.stop_reason,
            )

    def drop(self, keys: Sequence[str]) -> None:
        """See `Stepper`. vLLM's output side has not seen the samples end, so finished ones are dropped, too."""
        self._engine.abort_request(list(keys), internal=True)


def _core_log_probs(found: Any, tokens: Sequence[int]) -> Sequence[float]:
    """Log-probabilities of sampled ids out of the core's arrays [steps, 1 + likeliest asked for], sampled id first."""
    if not tokens:
        return ()
    places = range(len(tokens))
    # Item by item: a step has one row nearly always, and array operations cost more than the row.
    if found is None or any(found.logprob_token_ids.item(place, 0) != tokens[place] for place in places):
        raise MissingLogProbError(
            f"vLLM sampled tokens {list(tokens)} and returned log-probabilities of "
            f"{None if found is None else found.logprob_token_ids.tolist()}: ask it for the sampled tokens'"
        )
    return [found.logprobs.item(place, 0) for place in places]


class TextStepper:
    """Goes through vLLM's detokenizer and request outputs: for stop strings and pictures."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def submit(self, name: str, prompt: dict[str, Any], sampling: Any, adapter: Any = None) -> str:
        """See `Stepper`; the key is the name."""
        self._engine.add_request(name, prompt, sampling, lora_request=adapter)
        return name

    def step(self) -> Iterator[StepOutput]:
        """See `Stepper`."""
        for output in self._engine.step():
            (completion,) = output.outputs
            tokens = list(completion.token_ids)
            candidates = completion.logprobs[-len(tokens) :] if tokens else ()
            yield StepOutput(
                output.request_id,
                tokens,
                [sampled_log_prob(each, token) for each, token in zip(candidates, tokens, strict=True)],
                completion.finish_reason if output.finished else None,
                completion.stop_reason,
                output.prompt_token_ids,
            )

    def drop(self, keys: Sequence[str]) -> None:
        """See `Stepper`."""
        self._engine.abort_request(list(keys))
