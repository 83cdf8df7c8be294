"""Pictures and weight sync in the real vLLM and SGLang on the CPU; skipped where they are not installed."""

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
# The picture processors of transformers need it.
NEEDED = "torchvision"


@pytest.mark.parametrize(
    "kind", [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
)
def test_pictures_decide_alike_in_the_engine_and_in_the_embedded_one_before_and_after_an_update(kind, tmp_path):
    missing = [name for name in (kind, NEEDED) if importlib.util.find_spec(name) is None]
    if missing or torch.cuda.is_available():
        pytest.skip(f"missing: {missing}; CUDA is there: {torch.cuda.is_available()}; this runs {kind} on the CPU")
    output = tmp_path / "found.json"
    paths = [*([str(STUBS)] if kind == "sglang" else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(HERE / "vision_run.py"), kind, str(output)],
        env={**os.environ, **environment}, timeout=570, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = json.loads(output.read_text())
    for when in ("start", "updated"):
        samples = found[when]
        assert len(samples) == 8
        for length, widened, same, gap, _ in samples:
            assert same
            assert gap < 1e-4
            # SGLang does not say which ids it has put in place of a picture.
            assert length == widened or kind == "sglang"
        assert samples[0][4] != samples[6][4], "the picture decides"
        assert {widened for _, widened, *_ in samples} == {29, 3, 25}
    assert found["start"][0][4] != found["updated"][0][4], "the update was needed"
    assert found["tensors"][0] == found["tensors"][1]
