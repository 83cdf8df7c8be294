import base64
import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("httpx")

from rft_rewards import (
    ChatJudge,
    JudgePrompt,
    RemoteRewardError,
    RemoteRewardModel,
    RetryPolicy,
    RewardComputationEngine,
    RewardRecipe,
    RewardSample,
)
from rft_rewards.server import RewardHandler, RewardServer
from rft_rewards.wire import picture_address

QUICK = RetryPolicy(max_tries=12, backoff_seconds=0.01, max_backoff_seconds=0.05)


@contextmanager
def serving(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


def _url(server, path="/v1/score"):
    return f"http://127.0.0.1:{server.server_address[1]}{path}"


def _score(model, samples, **options):
    engine = RewardComputationEngine(RewardRecipe(functions=[model], **options))
    results = engine.compute(samples)
    return [result.total for result in results], engine.take_counters()


class Seen:
    """A reward function that counts how often it saw each response."""

    name = "seen"

    def __init__(self):
        self.times = Counter()
        self.samples = []

    def __call__(self, samples):
        self.times.update(sample.response for sample in samples)
        self.samples += samples
        return [float(sample.response) for sample in samples]


KINDS = ["500", "time-out", "reset", "truncated", "wrong length"]


def _fates(seed):
    """What becomes of each reply in turn: None is good, and about three of ten are not."""
    chance = random.Random(seed)
    return [chance.choice(KINDS) if chance.random() < 0.3 else None for _ in range(10_000)]


class Unreliable(RewardHandler):
    """Scores as asked; then something may go wrong on the way back, whichever request comes next."""

    fates = iter(_fates(11))
    failures: ClassVar = Counter()

    def reply(self, status, body):
        kind = next(self.fates)
        if kind is None:
            super().reply(status, body)
            return
        self.failures[kind] += 1
        if kind == "500":
            super().reply(500, b'{"error": "injected"}')
        elif kind == "time-out":
            self.connection.recv(1)  # until the client hangs up
            self.close_connection = True
        elif kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            self.connection.close()
            self.close_connection = True
        elif kind == "truncated":
            super().reply(200, body[: len(body) // 2])
        else:
            super().reply(200, json.dumps({**json.loads(body), "scores": json.loads(body)["scores"][:-1]}).encode())

    def finish(self):
        with suppress(OSError):  # the connection was reset on purpose
            super().finish()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nothing_is_lost_and_nothing_scored_twice_under_thirty_percent_failures():
    function = Seen()
    assert set(_fates(11)[:100]) == {None, *KINDS}  # there are 100 requests and more
    retry = RetryPolicy(max_tries=100, timeout_seconds=0.5, backoff_seconds=0.01, max_backoff_seconds=0.02)
    with serving(RewardServer(function, handler=Unreliable)) as server:
        server.handle_error = lambda *_: None
        model = RemoteRewardModel(_url(server), batch_size=4, concurrency=8, retry=retry)
        totals, counters = _score(model, [RewardSample(str(index)) for index in range(400)])
    assert totals == [float(index) for index in range(400)]
    assert set(function.times.values()) == {1}
    assert len(function.times) == 400
    assert all(Unreliable.failures[kind] for kind in KINDS)
    assert counters["remote/retries"] >= sum(Unreliable.failures.values())
    assert counters["remote/unscored"] == 0
    assert counters["remote/timeouts"] > 0
    assert counters["remote/bad_replies"] > 0


def test_batches_keep_everything_about_a_sample():
    function = Seen()
    picture, other = b"\x89PNG\r\n\x1a\nfirst", b"\xff\xd8\xffsecond"
    sample = RewardSample(
        "1", (4, 5), "why?", "one", "default", {"level": 3}, (picture, other, "https://x/y.png"), True
    )
    with serving(RewardServer(function)) as server:
        _score(RemoteRewardModel(_url(server)), [sample])
    (seen,) = function.samples
    assert (seen.response_ids, seen.prompt, seen.reference, seen.metadata) == ((4, 5), "why?", "one", {"level": 3})
    assert seen.truncated
    kinds = [address.partition(";")[0] for address in seen.images[:2]]
    decoded = [base64.b64decode(address.partition(",")[2]) for address in seen.images[:2]]
    assert kinds == ["data:image/png", "data:image/jpeg"]
    assert decoded == [picture, other]
    assert seen.images[2] == "https://x/y.png"
    with pytest.raises(TypeError, match="a picture is a int"):
        picture_address(3)


def test_partial_failures_keep_the_good_scores():
    def partly(samples):
        return [1.0 / (int(sample.response) % 3) for sample in samples]

    samples = [RewardSample(str(index)) for index in range(6)]
    retry = RetryPolicy(max_tries=2, backoff_seconds=0.01)
    with serving(RewardServer(partly)) as server:
        with pytest.raises(RemoteRewardError, match=r"scored 4 of 6 samples; sample 0: .*ZeroDivisionError") as caught:
            _score(RemoteRewardModel(_url(server), batch_size=3, retry=retry), samples)
        assert caught.value.scores == (None, 1.0, 0.5, None, 1.0, 0.5)
        model = RemoteRewardModel(_url(server), batch_size=3, retry=retry, on_failure="missing")
        totals, counters = _score(model, samples, missing={"remote": -1.0})
    assert totals == [-1.0, 1.0, 0.5, -1.0, 1.0, 0.5]
    assert (counters["remote/unscored"], counters["remote/missing"]) == (2, 2)
    # Two batches of three; what the server could not score is asked for once more, alone.
    assert (counters["remote/requests"], counters["remote/retries"]) == (4, 2)


def test_tries_and_time_are_bounded():
    with socket.socket() as silent:  # accepts connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen(32)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/score"
        retry = RetryPolicy(max_tries=100, timeout_seconds=0.2, budget_seconds=1.0, backoff_seconds=0.01)
        model = RemoteRewardModel(url, batch_size=1, concurrency=8, retry=retry, on_failure="missing")
        _, counters = _score(model, [RewardSample("1")] * 20, missing={"remote": 0.0})
        assert counters["remote/unscored"] == 20
        assert counters["remote/requests"] <= 8 * 5  # eight at once, a fifth of the time each; else up to 2,000
        few = RetryPolicy(max_tries=2, timeout_seconds=0.1, backoff_seconds=0.01)
        with pytest.raises(RemoteRewardError, match=r"try 2 of 2"):
            _score(RemoteRewardModel(url, retry=few), [RewardSample("1")])


class Refusing(BaseHTTPRequestHandler):
    requests: ClassVar = []

    def do_POST(self):
        Refusing.requests.append(self.path)
        body = f"key {self.headers['Authorization']}, {self.headers['X-Team']} and {self.path} are not known".encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_refusals_are_final_and_secrets_stay_secret(caplog):
    caplog.set_level(logging.DEBUG)
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Refusing)) as server:
        address = _url(server) + "?token=query-secret-7"
        model = RemoteRewardModel(address, api_key="key-secret-5", headers={"X-Team": "team-secret-3"}, retry=QUICK)
        with pytest.raises(RemoteRewardError, match="status 403") as caught:
            _score(model, [RewardSample("1")])
    assert Refusing.requests == ["/v1/score?token=query-secret-7"]
    logged = "".join(record.getMessage() for record in caplog.records)
    shown = f"{caught.value} {model!r} {model._caller!r} {logged}"
    assert "***" in shown
    assert not any(secret in shown for secret in ("key-secret-5", "query-secret-7", "team-secret-3"))
    with pytest.raises(ValueError, match="holds a user or password") as caught:
        RemoteRewardModel("http://user:pass-word-9@host/v1/score")
    assert "pass-word-9" not in str(caught.value)


def test_server_asks_for_its_token_and_refuses_what_is_no_request():
    function = Seen()
    with serving(RewardServer(function, token="open sesame", max_body_bytes=2000)) as server:
        assert _score(RemoteRewardModel(_url(server), api_key="open sesame"), [RewardSample("7")])[0] == [7.0]
        with pytest.raises(RemoteRewardError, match="status 401"):
            _score(RemoteRewardModel(_url(server), api_key="closed"), [RewardSample("7")])
        with pytest.raises(RemoteRewardError, match="status 413"):
            _score(RemoteRewardModel(_url(server), api_key="open sesame"), [RewardSample("7" * 3000)])
        with pytest.raises(RemoteRewardError, match="status 404"):
            _score(RemoteRewardModel(_url(server, "/score"), api_key="open sesame"), [RewardSample("7")])
        request = urllib.request.Request(
            _url(server), b'{"version": "rft-rewards/1", "samples": [{}]}', {"Authorization": "Bearer open sesame"}
        )
        with pytest.raises(urllib.error.HTTPError, match="400") as caught:
            urllib.request.urlopen(request)
        caught.value.close()
    assert function.times == {"7": 1}


def test_reference_server_as_a_process_with_health_and_schema():
    command = [sys.executable, "-m", "rft_rewards.serve", "--function", "sample_functions:lengths", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            url = process.stdout.readline().split()[-1]
            totals, _ = _score(RemoteRewardModel(url), [RewardSample("four"), RewardSample("")])
            with urllib.request.urlopen(url.replace("/v1/score", "/health")) as reply:
                health = json.load(reply)
            with urllib.request.urlopen(url.replace("/v1/score", "/schema")) as reply:
                schema = json.load(reply)
        finally:
            process.terminate()
            process.wait(timeout=60)
    assert totals == [4.0, 0.0]
    assert health == {"status": "ok", "function": "lengths", "scored": 2, "replayed": 0}
    assert schema["request"]["properties"]["version"] == {"const": "rft-rewards/1"}


def test_lone_surrogates_and_null_bytes_travel():
    function = Seen()
    function.__class__ = type(
        "Any", (Seen,), {"__call__": lambda self, samples: [float(len(s.response)) for s in samples]}
    )
    with serving(RewardServer(function)) as server:
        assert _score(RemoteRewardModel(_url(server)), [RewardSample("a\ud800\x00")])[0] == [3.0]


class Chat(BaseHTTPRequestHandler):
    """A chat endpoint that answers by what the question holds."""

    requests: ClassVar = []
    log_probs = True

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Chat.requests.append(request)
        content = request["messages"][-1]["content"]
        text = content if isinstance(content, str) else content[0]["text"]
        verdict = "Yes" if "good" in text else "No" if "bad" in text else "Perhaps"
        choice = {"message": {"role": "assistant", "content": verdict}}
        if Chat.log_probs and request.get("logprobs"):
            top = [{"token": "Yes", "logprob": -0.2231435513142097}, {"token": " no", "logprob": -1.6094379124341003}]
            choice["logprobs"] = {"content": [{"token": "Yes", "logprob": -0.2231435513142097, "top_logprobs": top}]}
        body = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_chat_judge():
    judge = JudgePrompt(template="Q: {prompt} A: {response} gold: {reference}", system="Judge.")
    samples = [RewardSample("good {x}", prompt="p", reference="g"), RewardSample("bad"), RewardSample("odd")]
    Chat.requests.clear()
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Chat)) as server:
        url = _url(server, "/v1/chat/completions")
        totals, _ = _score(ChatJudge(url, model="m", judge=judge, retry=QUICK), samples)
        assert totals == pytest.approx([0.8, 0.8, 0.8])  # exp(-0.223) = 0.8 of yes against 0.2 of no
        # Requests run at the same time, so the order of their arrival says nothing.
        assert {(r["temperature"], r["logprobs"], r["model"]) for r in Chat.requests} == {(0, True, "m")}
        assert sorted(r["messages"][-1]["content"] for r in Chat.requests) == [
            "Q:  A: bad gold: ",
            "Q:  A: odd gold: ",
            "Q: p A: good {x} gold: g",
        ]
        silent = ChatJudge(url, model="m", judge=judge, log_probs=False)
        totals, counters = _score(silent, samples, missing={"judge": -1.0})
        assert totals == [1.0, 0.0, -1.0]
        assert (counters["judge/no_verdict"], counters["judge/missing"]) == (1, 1)
        pictured = RewardSample("good", images=(b"\x89PNG\r\n\x1a\na", b"\x89PNG\r\n\x1a\nb"))
        _score(ChatJudge(url, model="m", judge=judge), [pictured])
    parts = Chat.requests[-1]["messages"][-1]["content"]
    assert [part["type"] for part in parts] == ["text", "image_url", "image_url"]
    assert parts[1]["image_url"]["url"] != parts[2]["image_url"]["url"]


def test_score_judge_reads_numbers():
    judge = JudgePrompt(template="{response}", kind="score", lowest=1, highest=5)
    assert judge.score_of_text("4 out of 5") == 0.75
    assert judge.score_of_text("9") is None
    assert judge.score_of_text("none") is None
    assert judge.score_of_log_probs({"1": -0.6931471805599453, " 5": -0.6931471805599453}) == pytest.approx(0.5)
    assert judge.score_of_log_probs({"maybe": -0.1}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"template": "no field"}, "needs {response}"),
        ({"template": "{response} {other}"}, "other"),
        ({"template": "{response}", "kind": "rank"}, "kind is 'rank'"),
        ({"template": "{response}", "lowest": 5, "highest": 5}, "lowest is 5"),
        ({"template": "{response}", "yes": "no "}, "two different words"),
    ],
)
def test_judge_prompts_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        JudgePrompt(**arguments)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="batch_size is 0"):
        RemoteRewardModel("http://h/v1/score", batch_size=0)
    with pytest.raises(ValueError, match="on_failure is 'ignore'"):
        RemoteRewardModel("http://h/v1/score", on_failure="ignore")
    with pytest.raises(ValueError, match="concurrency is 0"):
        RemoteRewardModel("http://h/v1/score", concurrency=0)
    with pytest.raises(ValueError, match="http:// or https://"):
        RemoteRewardModel("ftp://h/v1/score")
    with pytest.raises(ValueError, match="max_tries is 0"):
        RetryPolicy(max_tries=0)
    with pytest.raises(ValueError, match="budget_seconds is 0"):
        RetryPolicy(budget_seconds=0)


def test_waits_grow_with_jitter_and_heed_the_server():
    policy = RetryPolicy(backoff_seconds=1.0, max_backoff_seconds=4.0)
    for tries, mean in ((1, 1.0), (2, 2.0), (3, 4.0), (9, 4.0)):
        waits = {policy.wait_seconds(tries) for _ in range(50)}
        assert len(waits) > 40
        assert all(mean / 2 <= wait <= mean * 1.5 for wait in waits)
    assert policy.wait_seconds(1, asked_seconds=30.0) == 30.0
