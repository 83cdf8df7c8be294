"""rft-sync as a stranger gets it: the built wheel in an empty environment, with torch alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFUSED = ("rft_dist", "rft_engines", "rft_trainer", "transformers", "deepspeed", "peft", "vllm", "sglang")

REFUSE_IMPORTS = f"""
import sys
from importlib.abc import MetaPathFinder


class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {REFUSED!r}:
            raise ImportError(f"{{name}} must not be imported")


sys.meta_path.insert(0, Refuse())
"""


def _run(*command, cwd, **environment):
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv builds the wheel and the environment")
def test_the_wheel_works_with_torch_alone(tmp_path):
    _run("uv", "build", "--package", "rft-sync", "--no-sources", "--wheel", "--out-dir", tmp_path / "dist", cwd=ROOT)
    (wheel,) = (tmp_path / "dist").glob("rft_sync-*.whl")
    _run("uv", "venv", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    constraint = tmp_path / "constraint.txt"
    constraint.write_text("torch==2.13.0\n")
    _run("uv", "pip", "install", "--python", python, "--constraint", constraint, wheel, cwd=tmp_path)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "refuse_imports.py").write_text(REFUSE_IMPORTS)
    (site / "refuse_imports.pth").write_text("import refuse_imports\n")
    shutil.copytree(ROOT / "apps" / "sync_only", tmp_path / "sync_only")
    where = _run(python, "-c", "import rft_sync; print(rft_sync.__file__)", cwd=tmp_path)
    assert where.startswith(str(site))
    alone = _run(python, "sync_only", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "the engine answers 100% of all pairs rightly" in alone
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    ranks = _run(*launcher, "sync_only", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert ranks.count("the engine answers 100% of all pairs rightly") == 2
    refused = subprocess.run([python, "-c", "import transformers"], capture_output=True, timeout=60, check=False)
    assert refused.returncode != 0
