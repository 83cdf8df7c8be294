"""Partial rollouts: a response grows by a bounded number of tokens in a step and goes on in the next one."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rft_engines import FinishReason, Generation, GenerationRequest, SamplingParams, sample_seed

Generate = Callable[[Sequence[GenerationRequest], SamplingParams], list[Generation]]


@dataclass
class Sample:
    """One response so far: ids, log-probs of the engine and weights version of each token [T]."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str | None = None

    def take(self, generation: Generation, *, asked: int, limit: int) -> None:
        """Append what was generated when `asked` tokens were; one of `limit` tokens is finished, cut by its length."""
        self.token_ids += generation.token_ids
        self.log_probs += generation.log_probs
        self.versions += [generation.weights_version] * len(generation.token_ids)
        if generation.finish_reason is FinishReason.STOP:
            self.finish = FinishReason.STOP.value
            return
        # Fewer than asked for: the engine's context is full, and the next request would not fit into it.
        context_is_full = generation.finish_reason is FinishReason.LENGTH and len(generation.token_ids) < asked
        if len(self.token_ids) >= limit or context_is_full or not generation.token_ids:
            self.finish = FinishReason.LENGTH.value


@dataclass
class Group:
    """The n responses to one prompt: `item` numbers it, `prompt_ids` are its ids, `seed` that of its first request."""

    item: int
    prompt_ids: list[int]
    seed: int
    samples: list[Sample]

    def generations(self, sampling: SamplingParams) -> list[Generation]:
        """The finished responses as if each came from one call; the version is that of the oldest token."""
        return [
            Generation(
                request_id=str(self.item),
                sample_index=place,
                prompt_token_ids=tuple(self.prompt_ids),
                token_ids=tuple(sample.token_ids),
                log_probs=tuple(sample.log_probs),
                finish_reason=FinishReason(sample.finish or FinishReason.ABORT),
                weights_version=min(sample.versions, default=0),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            )
            for place, sample in enumerate(self.samples)
        ]

    @property
    def is_finished(self) -> bool:
        """Whether every response is."""
        return all(sample.finish is not None for sample in self.samples)


class PartialRollouts:
    """Generates at most `tokens` tokens of each response per step; groups are given out when all their responses end.

    A response whose oldest token is `staleness` weight versions behind is finished within the step, so no token that is
    trained on is older than that.

    Args:
        generate: the engine's call; collective over the rollout TP group.
    """

    def __init__(self, *, tokens: int, staleness: int, generate: Generate) -> None:
        self._tokens = tokens
        self._staleness = staleness
        self._generate = generate
        self._held: list[Group] = []

    def step(
        self,
        items: Sequence[int],
        requests: Sequence[GenerationRequest],
        sampling: SamplingParams,
        *,
        version: int,
    ) -> list[Group]:
        """Begin `requests`, go on with what is held; the finished groups, those held first.

        Two generate calls, on every rank, whatever it holds. Collective over the rollout TP group.
        """
        limit = sampling.max_new_tokens
        self._continue(sampling, version)
        begun = [
            Group(item, list(request.prompt_token_ids), request.seed or 0, [Sample() for _ in range(sampling.n)])
            for item, request in zip(items, requests, strict=True)
        ]
        first = replace(sampling, max_new_tokens=min(self._tokens, limit))
        for number, generation in enumerate(self._generate(requests, first)):
            begun[number // sampling.n].samples[number % sampling.n].take(
                generation, asked=first.max_new_tokens, limit=limit
            )
        groups = [*self._held, *begun]
        self._held = [group for group in groups if not group.is_finished]
        return [group for group in groups if group.is_finished]

    def _continue(self, sampling: SamplingParams, version: int) -> None:
        limit = sampling.max_new_tokens
        going: list[tuple[Group, int]] = [
            (group, place)
            for group in self._held
            for place, sample in enumerate(group.samples)
            if sample.finish is None
        ]
        requests = []
        for group, place in going:
            sample = group.samples[place]
            left = limit - len(sample.token_ids)
            is_due = bool(sample.versions) and version - sample.versions[0] >= self._staleness
            requests.append(
                GenerationRequest(
                    (*group.prompt_ids, *sample.token_ids),
                    # Another seed for each continuation: the numbers of its first tokens were used already.
                    seed=sample_seed(sample_seed(group.seed, place), len(sample.token_ids)),
                    request_id=f"{group.item}-{place}-{len(sample.token_ids)}",
                    max_new_tokens=left if is_due else min(self._tokens, left),
                )
            )
        generations = self._generate(requests, replace(sampling, n=1))
        for (group, place), request, generation in zip(going, requests, generations, strict=True):
            group.samples[place].take(generation, asked=request.max_new_tokens or limit, limit=limit)

    def state_dict(self) -> list[dict[str, Any]]:
        """The groups that this rank holds, as plain values."""
        return [asdict(group) for group in self._held]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restore what `state_dict` gave."""
        self._held = [Group(**{**group, "samples": [Sample(**s) for s in group["samples"]]}) for group in state]
