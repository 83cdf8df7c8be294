"""How long a browser takes to open a report of 2,000 rollouts, against an empty page in the same browser.

    python benchmarks/report_open.py [ROLLOUTS] [TOKENS]

Needs Chromium. Prints the page's own clock when its script is done (from the start of navigation), and the wall time of
the whole browser until it has drawn the page, for the report and for an empty page.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rft_trainer.report.page import write_report

ROOT = Path(__file__).parents[1]
SAMPLES, STEPS = 8, 10
BUDGET_SECONDS = 2.0


def made_run(folder: Path, rollouts: int, tokens: int) -> Path:
    spec = importlib.util.spec_from_file_location("pages", ROOT / "packages/rft-trainer/tests/report/pages.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    pages.make_run(folder, steps=STEPS, groups=rollouts // SAMPLES // STEPS, samples=SAMPLES, length=tokens)
    return write_report(folder, max_mib=1024).page


def browse(browser: str, address: str, *action: str) -> tuple[float, str]:
    """Seconds of the whole browser, and what it printed."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900", *action, address]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, done.stdout


def main() -> None:
    rollouts, tokens = (int(value) for value in (*sys.argv[1:], "2000", "150")[:2])
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium on the path")
    with tempfile.TemporaryDirectory() as folder:
        page = made_run(Path(folder), rollouts, tokens)
        empty = Path(folder) / "empty.html"
        empty.write_text("<!doctype html><title>empty</title>")
        print(f"{rollouts} rollouts of {tokens} tokens, {page.stat().st_size / 2**20:.1f} MiB")
        address, picture = page.as_uri() + "#open=1/0", f"--screenshot={folder}/page.png"
        for _ in range(3):
            _, document = browse(browser, address, "--dump-dom")
            ready = int(re.findall(r'data-ready="(\d+)"', document)[0]) / 1000
            drawn, _ = browse(browser, address, picture)
            nothing, _ = browse(browser, empty.as_uri(), picture)
            print(f"ready after {ready:.2f} s; browser {drawn:.2f} s, with an empty page {nothing:.2f} s")
            print(f"within {BUDGET_SECONDS} s: {ready <= BUDGET_SECONDS}, {drawn - nothing <= BUDGET_SECONDS}")


if __name__ == "__main__":
    main()
