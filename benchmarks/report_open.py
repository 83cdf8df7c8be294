"""How long a browser takes to open a report of 2,000 rollouts.

    python benchmarks/report_open.py [ROLLOUTS] [TOKENS]

Needs Chromium. The browser is started once and asked over its debugging pipe. Printed for each opening: the wall time
from the call to navigate until list and chosen group are shown and a frame is drawn, that of an empty page, and the
time until a search through all texts is answered.
"""

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rft_trainer.report.page import write_report

ROOT = Path(__file__).parents[1]
SAMPLES, STEPS = 8, 10
BUDGET_SECONDS = 2.0
DRAWN = """new Promise((done) => {
  const look = () => document.documentElement?.dataset.ready
    ? requestAnimationFrame(() => setTimeout(() => done(document.querySelectorAll(".token").length)))
    : setTimeout(look, 1);
  look();
})"""
EMPTY = "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(0))))"
SEARCH = """new Promise((done) => {
  const field = document.querySelector("input[name=text]"), count = document.getElementById("count");
  field.value = "apples";
  field.dispatchEvent(new Event("input", { bubbles: true }));
  const look = () => count.textContent.startsWith("searching") ? setTimeout(look, 1) : done(count.textContent);
  setTimeout(look, 1);
})"""


def made_run(folder: Path, rollouts: int, tokens: int) -> Path:
    spec = importlib.util.spec_from_file_location("pages", ROOT / "packages/rft-trainer/tests/report/pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    pages.make_run(folder, steps=STEPS, groups=rollouts // SAMPLES // STEPS, samples=SAMPLES, length=tokens)
    return write_report(folder, max_mib=1024).page


class Browser:
    """One page of a Chromium, over the protocol that its debugging pipe speaks: JSON messages that end in a zero."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._rest = 0, b""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                self._rest += os.read(self._answers, 1 << 16)
            line, _, self._rest = self._rest.partition(b"\0")
            if not line:
                continue
            answer = json.loads(line)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def evaluate(self, expression: str) -> tuple[float, Any]:
        """Seconds until the promise is kept, and its value."""
        start = time.perf_counter()
        result = self._ask("Runtime.evaluate", self._session, expression=expression, awaitPromise=True)
        return time.perf_counter() - start, result["result"].get("value")

    def open(self, address: str, drawn: str) -> tuple[float, Any]:
        """Seconds from navigating until `drawn` is kept, and its value."""
        self._ask("Page.navigate", self._session, url="about:blank")
        start = time.perf_counter()
        self._ask("Page.navigate", self._session, url=address)
        _, value = self.evaluate(drawn)
        return time.perf_counter() - start, value


@contextmanager
def browser(program: str, folder: str) -> Iterator[Browser]:
    (their_commands, commands), (answers, their_answers) = os.pipe(), os.pipe()

    # Out of the way of 3 and 4, where the browser looks for its ends.
    reads, writes = (fcntl.fcntl(end, fcntl.F_DUPFD, 64) for end in (their_commands, their_answers))

    def pipes() -> None:
        os.dup2(reads, 3)
        os.dup2(writes, 4)

    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1400,900",
        f"--user-data-dir={folder}/profile",
    ]
    process = subprocess.Popen(
        [program, *flags, "--remote-debugging-pipe"], preexec_fn=pipes, close_fds=False, stderr=subprocess.DEVNULL
    )
    try:
        yield Browser(commands, answers)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    rollouts, tokens = (int(value) for value in (*sys.argv[1:], "2000", "150")[:2])
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("no Chromium on the path")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page = made_run(Path(folder), rollouts, tokens)
        empty = Path(folder) / "empty.html"
        empty.write_text("<!doctype html><title>empty</title>")
        size = page.stat().st_size / 2**20
        print(f"{rollouts} rollouts of {tokens} tokens, {size:.1f} MiB; load {os.getloadavg()[0]:.1f}", flush=True)
        with browser(program, folder) as shown:
            for _ in range(5):
                nothing, _ = shown.open(empty.as_uri(), EMPTY)
                seconds, found = shown.open(page.as_uri() + "#open=1/0", DRAWN)
                searched, count = shown.evaluate(SEARCH)
                print(
                    f"open {seconds:.2f} s with {found} tokens shown (empty page {nothing:.2f} s), "
                    f"within {BUDGET_SECONDS} s: {seconds <= BUDGET_SECONDS}; first search {searched:.2f} s: {count}"
                )


if __name__ == "__main__":
    main()
