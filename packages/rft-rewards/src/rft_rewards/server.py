"""The reference server of the protocol `rft-rewards/1`, on the standard library."""

import asyncio
import hmac
import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rft_rewards.protocols import RewardFunction
from rft_rewards.recipe import function_name
from rft_rewards.sample import RewardSample
from rft_rewards.score import Score
from rft_rewards.scoring import checked_scores
from rft_rewards.wire import REPLY_SCHEMA, REQUEST_SCHEMA, SCORE_PATH, VERSION, unpacked_samples

REMEMBERED_REPLIES = 10_000


class RewardServer(ThreadingHTTPServer):
    """HTTP server that scores with one function, one request at a time.

    Args:
        function: the reward function; a coroutine function may be given too.
        host: address to listen on.
        port: 0 takes a free one, see `port`.
        token: bearer token that scoring requests must carry; None asks for none.
        max_body_bytes: longer requests are refused with status 413.
    """

    daemon_threads = True

    def __init__(
        self,
        function: RewardFunction,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        max_body_bytes: int = 256 << 20,
        handler: type["RewardHandler"] | None = None,
    ) -> None:
        super().__init__((host, port), handler or RewardHandler)
        self.function = function
        self.token = token
        self.max_body_bytes = max_body_bytes
        self.scored = 0
        self.replayed = 0
        self._replies: OrderedDict[str, Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return int(self.server_address[1])

    def reply_to(self, body: bytes, key: str | None) -> bytes:
        """Reply to a scoring request; the same one for the same key.

        Raises:
            ValueError: the body is no request.
        """
        if key is None:
            return self._scored(body)
        with self._lock:
            known = self._replies.get(key)
            if known is None:
                promise: Future[bytes] = Future()
                self._replies[key] = promise
                while len(self._replies) > REMEMBERED_REPLIES:
                    self._replies.popitem(last=False)
            else:
                self.replayed += 1
        if known is not None:
            return known.result()
        try:
            promise.set_result(self._scored(body))
        except BaseException as error:  # whoever waits for this reply gets the error too
            with self._lock:
                self._replies.pop(key, None)
            promise.set_exception(error)
            raise
        return promise.result()

    def _scored(self, body: bytes) -> bytes:
        identities, samples = unpacked_samples(body)
        with self._turn:
            entries = self._entries(identities, samples)
        return json.dumps({"version": VERSION, "scores": entries}).encode()

    def _entries(self, identities: Sequence[str], samples: Sequence[RewardSample]) -> list[dict[str, Any]]:
        """Scores of all samples; where the batch fails, each alone, so that one bad sample costs only itself."""
        try:
            scores = self._call(samples)
        except Exception as error:  # noqa: BLE001 - told to the client
            if len(samples) == 1:
                return [{"id": identities[0], "error": f"{type(error).__name__}: {error}"}]
            pairs = zip(identities, samples, strict=True)
            return [entry for identity, sample in pairs for entry in self._entries([identity], [sample])]
        self.scored += len(samples)
        return [_entry(identity, score) for identity, score in zip(identities, scores, strict=True)]

    def _call(self, samples: Sequence[RewardSample]) -> list[Score]:
        raw: Any = self.function(samples)
        if inspect.isawaitable(raw):
            raw = asyncio.run(_awaited(raw))
        return checked_scores(function_name(self.function), raw, range(len(samples)))


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _entry(identity: str, score: Score) -> dict[str, Any]:
    if score.value is None:
        return {"id": identity, "error": "the function gave no score"}
    diagnostics = json.loads(json.dumps(dict(score.diagnostics), default=repr))
    return {"id": identity, "score": score.value, "steps": [list(s) for s in score.steps], "diagnostics": diagnostics}


class RewardHandler(BaseHTTPRequestHandler):
    """One request to a `RewardServer`."""

    protocol_version = "HTTP/1.1"
    server: RewardServer

    def do_GET(self) -> None:
        """Serve /health and /schema."""
        if self.path == "/health":
            name = function_name(self.server.function)
            state = {"status": "ok", "function": name, "scored": self.server.scored, "replayed": self.server.replayed}
            self.reply(200, json.dumps(state).encode())
        elif self.path == "/schema":
            self.reply(200, json.dumps({"request": REQUEST_SCHEMA, "reply": REPLY_SCHEMA}).encode())
        else:
            self.refuse(404, "there are /health, /schema and POST /v1/score")

    def do_POST(self) -> None:
        """Serve /v1/score."""
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            self.refuse(411, "send Content-Length")
            return
        if length > self.server.max_body_bytes:
            self.refuse(413, f"the request has {length} bytes, at most {self.server.max_body_bytes} are taken")
            return
        body = self.rfile.read(length)
        if self.path != SCORE_PATH:
            self.refuse(404, f"POST goes to {SCORE_PATH}")
        elif not self._is_allowed():
            self.refuse(401, "a valid bearer token is needed")
        else:
            self._score(body)

    def reply(self, status: int, body: bytes) -> None:
        """Send one JSON reply."""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, reason: str) -> None:
        """Send an error and end the connection, whose unread rest would be taken for the next request."""
        self.close_connection = True
        self.reply(status, json.dumps({"error": reason}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: they hold prompts and keys."""

    def _score(self, body: bytes) -> None:
        try:
            answer = self.server.reply_to(body, self.headers.get("Idempotency-Key"))
        except (ValueError, KeyError, TypeError) as error:
            self.refuse(400, f"{type(error).__name__}: {error}")
            return
        self.reply(200, answer)

    def _is_allowed(self) -> bool:
        if self.server.token is None:
            return True
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode())
