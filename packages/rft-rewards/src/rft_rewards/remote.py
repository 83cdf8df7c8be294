"""Reward models behind HTTP: a reward server, and a chat endpoint as judge."""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rft_rewards.backoff import RetryPolicy
from rft_rewards.errors import RemoteRewardError
from rft_rewards.judging import JudgePrompt
from rft_rewards.remote_client import JsonCaller, RequestFailed, shown_address
from rft_rewards.sample import RewardSample
from rft_rewards.score import Score
from rft_rewards.wire import VERSION, packed_sample, picture_address, read_reply

if TYPE_CHECKING:
    import httpx

FailurePolicy = Literal["error", "missing"]
_COUNTED = ("requests", "retries", "timeouts", "connection_failures", "bad_statuses", "bad_replies", "unscored")


@dataclass
class _Work:
    """One call of a remote model: what is scored so far, and what went wrong."""

    samples: Sequence[RewardSample]
    deadline: float
    scores: list[Score | None] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scores = [None] * len(self.samples)


class _RemoteScorer:
    """What the two remote models share: concurrency, the failure policy and the counts."""

    def __init__(self, caller: JsonCaller, name: str, on_failure: FailurePolicy) -> None:
        if on_failure not in ("error", "missing"):
            raise ValueError(f"on_failure is {on_failure!r}: give 'error' or 'missing'")
        self.name = name
        self._caller = caller
        self._on_failure = on_failure

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, url={shown_address(self._caller.url)!r})"

    async def _run(self, samples: Sequence[RewardSample], batch_size: int) -> list[Score]:
        if not samples:
            return []
        work = _Work(samples, time.monotonic() + self._caller.retry.budget_seconds)
        slots = asyncio.Semaphore(self._caller.concurrency)
        batches = [range(start, min(start + batch_size, len(samples))) for start in range(0, len(samples), batch_size)]

        async def one(client: "httpx.AsyncClient", positions: range) -> None:
            async with slots:
                await self._score_batch(client, work, positions)

        async with self._caller.client() as client:
            await asyncio.gather(*(one(client, positions) for positions in batches))
        return self._settled(work)

    async def _score_batch(self, client: "httpx.AsyncClient", work: _Work, positions: Sequence[int]) -> None:
        raise NotImplementedError

    def _settled(self, work: _Work) -> list[Score]:
        unscored = [position for position, score in enumerate(work.scores) if score is None]
        if unscored and self._on_failure == "error":
            shown = "; ".join(f"sample {position}: {work.reasons.get(position)}" for position in unscored[:5])
            raise RemoteRewardError(
                f"{self.name} at {shown_address(self._caller.url)} scored {len(work.samples) - len(unscored)} of "
                f"{len(work.samples)} samples; {shown}{'; ...' if len(unscored) > 5 else ''}. Check the server, raise "
                "the bounds of RetryPolicy, or use on_failure='missing'",
                [None if score is None else score.value for score in work.scores],
            )
        settled = [
            Score(None, diagnostics={"error": work.reasons.get(position, "")}) if score is None else score
            for position, score in enumerate(work.scores)
        ]
        work.counts["unscored"] = len(unscored)
        counts = {event: work.counts.get(event, 0) for event in _COUNTED}
        first = settled[0]  # the counts are those of the whole call, so they ride on one sample
        settled[0] = Score(first.value, first.steps, first.diagnostics, {**first.counts, **counts})
        return settled


class RemoteRewardModel(_RemoteScorer):
    """A reward server that speaks `rft-rewards/1`, see `python -m rft_rewards.serve`.

    Requests hold `batch_size` samples and run concurrently. One that fails (no connection, time-out, status 408, 409,
    425, 429 or 5xx, broken or wrong JSON) is tried again under the bounds of `retry` with the same idempotency key,
    so that the server scores each sample once. A sample for which the server reports an error is asked for again,
    alone with others of its kind; what was scored is kept.

    Args:
        url: address of the scoring call, for example `http://host:8000/v1/score`.
        name: name of the score.
        batch_size: samples in one request.
        concurrency: most requests under way at once.
        retry: bounds of trying again.
        on_failure: `error` raises when samples stay without a score; `missing` gives None for them, to be scored by
            `RewardRecipe.missing`, and counts them as `unscored`.
        api_key: bearer token; it is shown in no log, error or repr.
        headers: sent with every request.

    Raises:
        ValueError: an argument is out of range.
        RemoteRewardError: when called under `error`; it carries the scores that were made.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "remote",
        batch_size: int = 32,
        concurrency: int = 8,
        retry: RetryPolicy | None = None,
        on_failure: FailurePolicy = "error",
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: give 1 or more")
        caller = JsonCaller(
            url=url, retry=retry or RetryPolicy(), secret=api_key, headers=headers or {}, concurrency=concurrency
        )
        super().__init__(caller, name, on_failure)
        self._batch_size = batch_size

    async def __call__(self, samples: Sequence[RewardSample]) -> list[Score]:
        """Score `samples`, in order."""
        return await self._run(samples, self._batch_size)

    async def _score_batch(self, client: "httpx.AsyncClient", work: _Work, positions: Sequence[int]) -> None:
        left = list(positions)
        retry = self._caller.retry
        for tries in range(1, retry.max_tries + 1):
            payload = {
                "version": VERSION,
                "samples": [packed_sample(str(position), work.samples[position]) for position in left],
            }
            expected = [str(position) for position in left]
            try:
                entries = await self._caller.post(
                    client,
                    payload,
                    uuid.uuid4().hex,
                    work.deadline,
                    lambda reply, expected=expected: read_reply(reply, expected),  # type: ignore[misc]
                    work.counts,
                )
            except RequestFailed as error:
                work.reasons.update(dict.fromkeys(left, str(error)))
                return
            for position in left:
                entry = entries[str(position)]
                if "error" in entry:
                    work.reasons[position] = f"the server reports {str(entry['error'])[:300]}"
                else:
                    steps = tuple((int(index), float(reward)) for index, reward in entry.get("steps", ()))
                    work.scores[position] = Score(float(entry["score"]), steps, dict(entry.get("diagnostics", {})))
            left = [position for position in left if work.scores[position] is None]
            wait = retry.wait_seconds(tries)
            if not left or tries == retry.max_tries or time.monotonic() + wait >= work.deadline:
                return
            work.counts["retries"] = work.counts.get("retries", 0) + 1
            await asyncio.sleep(wait)


class ChatJudge(_RemoteScorer):
    """A chat endpoint in OpenAI's form as judge: one request per sample, the verdict from its first token.

    The score comes from the log-probabilities of the verdict where the endpoint gives them, else from its text; a
    reply without a verdict gives None, to be scored by `RewardRecipe.missing`, and is counted as `no_verdict`.
    Pictures of a sample go along as `image_url` parts.

    Args:
        url: address of the call, for example `https://host/v1/chat/completions`.
        model: name of the model at the endpoint.
        judge: the question.
        name: name of the score.
        concurrency, retry, on_failure, api_key, headers: as for `RemoteRewardModel`.
        max_answer_tokens: limit of the answer; the verdict must come first.
        log_probs: ask for log-probabilities; switch it off for endpoints that refuse the field.

    Raises:
        ValueError: an argument is out of range.
        RemoteRewardError: when called under `error`; it carries the scores that were made.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        judge: JudgePrompt,
        name: str = "judge",
        concurrency: int = 8,
        retry: RetryPolicy | None = None,
        on_failure: FailurePolicy = "error",
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        max_answer_tokens: int = 4,
        log_probs: bool = True,
    ) -> None:
        caller = JsonCaller(
            url=url, retry=retry or RetryPolicy(), secret=api_key, headers=headers or {}, concurrency=concurrency
        )
        super().__init__(caller, name, on_failure)
        self._model = model
        self._judge = judge
        self._max_answer_tokens = max_answer_tokens
        self._log_probs = log_probs

    async def __call__(self, samples: Sequence[RewardSample]) -> list[Score]:
        """Score `samples`, in order."""
        return await self._run(samples, 1)

    async def _score_batch(self, client: "httpx.AsyncClient", work: _Work, positions: Sequence[int]) -> None:
        for position in positions:
            payload = self._payload(work.samples[position])
            try:
                work.scores[position] = await self._caller.post(
                    client, payload, uuid.uuid4().hex, work.deadline, self._read, work.counts
                )
            except RequestFailed as error:
                work.reasons[position] = str(error)

    def _payload(self, sample: RewardSample) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [dict(message) for message in self._judge.messages(sample)]
        if sample.images:
            parts = [{"type": "image_url", "image_url": {"url": picture_address(item)}} for item in sample.images]
            messages[-1]["content"] = [{"type": "text", "text": messages[-1]["content"]}, *parts]
        payload = {
            "model": self._model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": self._max_answer_tokens,
        }
        return {**payload, "logprobs": True, "top_logprobs": 20} if self._log_probs else payload

    def _read(self, reply: Any) -> Score:
        choice = reply["choices"][0]
        text = choice["message"]["content"] or ""
        value: float | None = None
        tokens = (choice.get("logprobs") or {}).get("content") or []
        if tokens:
            candidates = {entry["token"]: float(entry["logprob"]) for entry in tokens[0].get("top_logprobs", ())}
            candidates.setdefault(tokens[0]["token"], float(tokens[0]["logprob"]))
            value = self._judge.score_of_log_probs(candidates)
        if value is None:
            value = self._judge.score_of_text(text)
        return Score(value, diagnostics={"verdict": text[:200]}, counts={"no_verdict": int(value is None)})
