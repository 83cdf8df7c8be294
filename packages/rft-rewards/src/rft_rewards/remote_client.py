"""One JSON request over HTTP that is tried again until it succeeds, is refused, or runs out of tries or time."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from rft_rewards.backoff import RetryPolicy
from rft_rewards.errors import MissingExtraError

if TYPE_CHECKING:
    import httpx

_Reply = TypeVar("_Reply")
_LOGGER = logging.getLogger("rft_rewards.remote")
_RETRIED = frozenset({408, 409, 425, 429})


class RequestFailed(Exception):  # noqa: N818 - internal: never leaves the package
    """A request got no usable reply; the text is safe to show."""


def shown_address(url: str) -> str:
    """`url` without user, password, query and fragment: what may appear in logs and errors."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"


@dataclass(kw_only=True)
class JsonCaller:
    """Posts JSON to one address.

    Attributes:
        url: address of the service; its query is sent but never shown.
        retry: bounds of trying again.
        secret: bearer token, or None.
        headers: sent with every request; their values are never shown.
        concurrency: most requests under way at once.
    """

    url: str = field(repr=False)
    retry: RetryPolicy
    secret: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    concurrency: int = 8

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is {shown_address(self.url)!r}: give an http:// or https:// address")
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                f"url {shown_address(self.url)!r} holds a user or password: give api_key or headers instead"
            )
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}: give 1 or more")

    def client(self) -> "httpx.AsyncClient":
        """A client for one event loop; use it as an async context manager.

        Raises:
            MissingExtraError: httpx is not installed (extra `remote`).
        """
        try:
            import httpx
        except ImportError as error:
            raise MissingExtraError(
                "remote reward models need httpx, extra 'remote': pip install 'rft-rewards[remote]'"
            ) from error

        full_url = httpx.URL(self.url)

        class QueryAdding(httpx.AsyncHTTPTransport):
            """Adds the query below the layer of httpx that logs addresses."""

            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                request.url = full_url
                try:
                    return await super().handle_async_request(request)
                finally:
                    request.url = full_url.copy_with(query=None)

        headers = dict(self.headers)
        if self.secret is not None:
            headers["Authorization"] = f"Bearer {self.secret}"
        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        transport = QueryAdding(limits=limits)
        # Without the environment: a .netrc entry for the host would replace the bearer token.
        return httpx.AsyncClient(
            headers=headers, timeout=self.retry.timeout_seconds, transport=transport, trust_env=False
        )

    async def post(
        self,
        client: "httpx.AsyncClient",
        payload: Mapping[str, Any],
        key: str,
        deadline: float,
        read: Callable[[Any], _Reply],
        counts: dict[str, int],
    ) -> _Reply:
        """The reply to `payload`, read by `read`, which raises ValueError for a reply that it cannot use.

        Every try carries the same idempotency key, so a server that answered a lost try answers again from memory.

        Args:
            deadline: `time.monotonic()` after which nothing is tried.
            counts: gets `requests`, `retries` and one entry per kind of failure.

        Raises:
            RequestFailed: refused, or out of tries or time.
        """
        reason = "the time budget was used up before the first try"
        for tries in range(1, self.retry.max_tries + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            counts["requests"] = counts.get("requests", 0) + 1
            outcome = await self._try(client, payload, key, min(left, self.retry.timeout_seconds), read)
            if not isinstance(outcome, _Failure):
                return outcome
            reason = outcome.reason
            counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
            _LOGGER.debug("%s: try %d of %d: %s", shown_address(self.url), tries, self.retry.max_tries, reason)
            wait = self.retry.wait_seconds(tries, outcome.asked_seconds)
            if outcome.final or tries == self.retry.max_tries or time.monotonic() + wait >= deadline:
                raise RequestFailed(f"{reason} (try {tries} of {self.retry.max_tries})")
            counts["retries"] = counts.get("retries", 0) + 1
            await asyncio.sleep(wait)
        raise RequestFailed(reason)

    async def _try(
        self,
        client: "httpx.AsyncClient",
        payload: Mapping[str, Any],
        key: str,
        limit_seconds: float,
        read: Callable[[Any], _Reply],
    ) -> "_Reply | _Failure":
        import httpx

        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        body = json.dumps(payload, allow_nan=False).encode("ascii")  # ASCII: lone surrogates must not end the step
        try:
            async with asyncio.timeout(limit_seconds):  # httpx limits each phase, not their sum
                response = await client.post(self.url.partition("?")[0], content=body, headers=headers)
        except (TimeoutError, httpx.TimeoutException):
            return _Failure("timeouts", f"no reply within {limit_seconds:.1f} s")
        except httpx.HTTPError as error:
            return _Failure("connection_failures", f"{type(error).__name__}: {self._safe(str(error))}")
        if response.status_code != 200:
            final = response.status_code < 500 and response.status_code not in _RETRIED
            reason = f"status {response.status_code}: {self._safe(response.text[:300])}"
            return _Failure("bad_statuses", reason, final=final, asked_seconds=_retry_after(response))
        try:
            return read(json.loads(response.content))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _Failure("bad_replies", f"unusable reply ({type(error).__name__}: {self._safe(str(error))[:300]})")

    def _safe(self, text: str) -> str:
        """`text`, which the server may have made from our request, without anything secret."""
        query = urlsplit(self.url).query
        for secret in (self.secret, *self.headers.values(), query):
            if secret:
                text = text.replace(secret, "***")
        return text


@dataclass(frozen=True, slots=True)
class _Failure:
    kind: str
    reason: str
    final: bool = False
    asked_seconds: float | None = None


def _retry_after(response: "httpx.Response") -> float | None:
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None
