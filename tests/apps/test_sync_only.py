"""The stranger's loop, in one process and under torchrun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

APP = str(Path(__file__).parents[2] / "apps" / "sync_only")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

pytestmark = pytest.mark.timeout(300)


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["alone", "torchrun"])
def test_the_engine_follows_the_trainer(launcher, tmp_path):
    done = run(*launcher, APP, "--recipe", "sums", "--output_dir", str(tmp_path), "--seed", "0")
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "reports.jsonl").read_text().splitlines()]
    assert [(row["step"], row["version"]) for row in rows] == [(10, 1), (20, 2), (30, 3), (40, 4)]
    assert {row["tensors"] for row in rows} == {5}
    # the engine only learns through the broadcast
    assert rows[-1]["right"] > rows[0]["right"] > 0


def test_flags_change_the_run_and_mistakes_are_named(tmp_path):
    done = run(APP, "--recipe", "quick", "--max_steps", "5", "--output_dir", str(tmp_path))
    assert done.returncode == 0
    assert len((tmp_path / "reports.jsonl").read_text().splitlines()) == 1
    refused = run(APP, "--engine_type", "vllm")
    assert refused.returncode == 2
    assert "--pretrain DIR" in refused.stderr
