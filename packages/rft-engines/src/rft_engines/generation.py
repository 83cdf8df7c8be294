"""What goes into an engine and what comes out."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from typing import Any

from rft_engines.counts import is_count, whole_numbers
from rft_engines.errors import InvalidRequestError, PromptTooLongError
from rft_engines.sampling import SamplingParams
from rft_engines.seeds import SEED_LIMIT, sample_seed


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    """An end-of-sequence id, a stop id or a stop string; the tokens that ended it are kept."""
    LENGTH = "length"
    """The token budget or the context ran out: the response is cut."""
    ABORT = "abort"
    """`abort()`, `sleep()` or the step budget ended it: the response is partial."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt.

    Attributes:
        prompt_token_ids: ids as the engine is to see them, at least one.
        seed: makes the samples reproducible, in [0, 2**63); None draws one from the engine's own seed.
        request_id: returned with each sample; None becomes the request's place in the call.
        images: pictures for a vision model, in the order of their placeholders in the prompt.
        max_new_tokens: lowers the call's `max_new_tokens` for this request.
    """

    prompt_token_ids: tuple[int, ...]
    _: KW_ONLY
    seed: int | None = None
    request_id: str | None = None
    images: tuple[Any, ...] = ()
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "prompt_token_ids", whole_numbers(self.prompt_token_ids))
        except TypeError as error:
            raise InvalidRequestError(
                f"request {self.request_id!r} has a prompt that is no sequence of ids ({error}): tokenise it first"
            ) from None
        object.__setattr__(self, "images", tuple(self.images))
        if not self.prompt_token_ids:
            raise InvalidRequestError(f"request {self.request_id!r} has an empty prompt: give at least one token id")
        if self.max_new_tokens is not None and not is_count(self.max_new_tokens):
            raise InvalidRequestError(
                f"request {self.request_id!r} has max_new_tokens={self.max_new_tokens!r}: give an integer of at least "
                f"1, or leave the finished sample out of the call"
            )
        # Engines take other seeds for none at all (vLLM: -1) or refuse them in the middle of a call.
        if self.seed is not None and not (is_count(self.seed, 0) and self.seed < SEED_LIMIT):
            raise InvalidRequestError(
                f"request {self.request_id!r} has seed={self.seed!r}: give an integer in [0, 2**63), as request_seed "
                f"makes them, or None"
            )

    def token_budget(self, sampling: SamplingParams, max_model_len: int | None) -> int:
        """Most new tokens for this prompt: the smallest of the call's, the request's and the context's limit."""
        limits = [sampling.max_new_tokens]
        if self.max_new_tokens is not None:
            limits.append(self.max_new_tokens)
        if max_model_len is not None:
            limits.append(max_model_len - len(self.prompt_token_ids))
        return min(limits)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sample, exactly as the engine made it.

    For a prompt (5, 6) answered by 7 and the end id 2: `prompt_token_ids=(5, 6)`, `token_ids=(7, 2)`, two
    `log_probs`, `finish_reason="stop"`.

    Attributes:
        request_id: of the request.
        sample_index: 0 .. n - 1 within the request.
        prompt_token_ids: the prompt as the engine saw it.
        token_ids: the sampled ids [T], never re-tokenised; an ending token was sampled or is absent. May be empty.
        log_probs: natural log-probability [T] of each sampled id under the distribution sampled from (after
            temperature, top-k and top-p; for greedy the untempered full distribution).
        finish_reason: see `FinishReason`.
        weights_version: number of the finished weight update that made it.
        temperature, top_p, top_k: of the distribution sampled from.
    """

    request_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    weights_version: int
    temperature: float
    top_p: float
    top_k: int

    def __post_init__(self) -> None:
        if len(self.log_probs) != len(self.token_ids):
            raise ValueError(
                f"sample {self.sample_index} of {self.request_id!r} has {len(self.token_ids)} tokens and "
                f"{len(self.log_probs)} log-probabilities: an engine must return one for each sampled token"
            )

    @property
    def truncated(self) -> bool:
        """Whether the response did not end by itself."""
        return self.finish_reason is not FinishReason.STOP


def sample_id(request: GenerationRequest, place: int) -> str:
    """The id a request goes by: its own, else its place in the call."""
    return request.request_id if request.request_id is not None else str(place)


def continuation(request: GenerationRequest, partial: Generation, sampling: SamplingParams) -> GenerationRequest | None:
    """The request that goes on with an interrupted sample, or None when its token budget is used up.

    The new prompt holds what was generated; its budget is what is left of the first one, so a sample of 100 tokens at
    most with 30 done gets 70 more.
    """
    left = request.token_budget(sampling, None) - len(partial.token_ids)
    if left < 1:
        return None
    seed = request.seed
    if seed is not None:
        seed = sample_seed(sample_seed(seed, partial.sample_index), len(partial.token_ids))
    prompt = partial.prompt_token_ids + partial.token_ids
    return replace(request, prompt_token_ids=prompt, max_new_tokens=left, seed=seed)


def split_by_length(
    requests: Sequence[GenerationRequest], max_model_len: int
) -> tuple[list[GenerationRequest], list[GenerationRequest]]:
    """Requests with room for at least one new token, and those without (count them, then leave them out)."""
    fitting = [request for request in requests if len(request.prompt_token_ids) < max_model_len]
    too_long = [request for request in requests if len(request.prompt_token_ids) >= max_model_len]
    return fitting, too_long


def check_requests(requests: Sequence[GenerationRequest], *, vocab_size: int | None, max_model_len: int | None) -> None:
    """Refuse what the engine cannot serve, before anything runs.

    Raises:
        InvalidRequestError: an id outside [0, vocab_size), or something else than a request.
        PromptTooLongError: a prompt of `max_model_len` tokens or more.
    """
    for place, request in enumerate(requests):
        if not isinstance(request, GenerationRequest):
            raise InvalidRequestError(f"request {place} is a {type(request).__name__}: give a GenerationRequest")
        name = sample_id(request, place)
        lowest, highest = min(request.prompt_token_ids), max(request.prompt_token_ids)
        if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
            wrong = lowest if lowest < 0 else highest
            raise InvalidRequestError(
                f"request {name!r} holds token id {wrong}, outside the model's vocabulary of {vocab_size}: "
                f"tokenise with the model's own tokenizer"
            )
        length = len(request.prompt_token_ids)
        if max_model_len is not None and length >= max_model_len:
            raise PromptTooLongError(
                f"request {name!r} has {length} prompt tokens, max_model_len={max_model_len} leaves no room for a new "
                f"one: raise max_model_len or take long prompts out first with split_by_length"
            )
