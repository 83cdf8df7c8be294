"""Weight sync into the real SGLang on the CPU; skipped where it is not installed (docs/engines/sglang.md says how)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
STUBS = HERE.parents[1] / "packages" / "rft-engines" / "tests" / "sglang_cpu"

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these tests run SGLang on the CPU, and CUDA is there"),
]


@pytest.mark.parametrize("kind", ["untied", "tied", "moe"])
def test_updates_reach_the_real_engine(kind, tmp_path):
    output = tmp_path / "found.json"
    paths = [str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "sglang_sync.py"), kind, str(output)],
        env={**os.environ, **environment},
        timeout=570,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = json.loads(output.read_text())
    assert found["start"] < 1e-4
    # SGLang 0.5.21 shows the weights of Llama's form, and none of its mixtures of experts.
    assert [verified > 0 for *_, verified in found["updates"]] == [kind != "moe"] * 3
    for version, (stale, after, reported, loaded, _) in enumerate(found["updates"], start=1):
        assert stale > 1e-3
        assert after < 1e-4  # stacked experts sent under the library's live names would be dropped in silence
        assert reported == version
        assert loaded > 20
    assert found["formats"] == ["flattened_bucket"]
    assert found["pairs"][0] == ["None"]
    assert found["pairs"][1] < 1e-4
    if found["sessions"]:
        assert "between" in found["without session"]
    assert found["repaired"][0] == 5 + (not found["sessions"])
    assert found["repaired"][1] < 1e-4
