import re
import subprocess
import sys
from pathlib import Path

import pytest

import rft_dist

PACKAGE = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)


def run(python, code, folder):
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-W", "error", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_has_a_block_that_runs(tmp_path):
    assert len(BLOCKS) == 1
    assert "2 + 2 = sample 0" in run(sys.executable, BLOCKS[0], tmp_path)


def test_the_readme_names_everything_public():
    text = (PACKAGE / "README.md").read_text()
    missing = [name for name in rft_dist.__all__ if not re.search(rf"\b{name}\b", text)]
    assert missing == []


@pytest.mark.slow
def test_the_wheel_alone_with_torch_runs_the_readme(tmp_path):
    """In an environment that holds torch, its requirements and this wheel, away from the checkout."""
    environment = tmp_path / "environment"
    commands = [
        ["uv", "build", "--package", "rft-dist", "--wheel", "--no-sources", "--out-dir", str(tmp_path / "dist")],
        ["uv", "venv", "--python", sys.executable, str(environment)],
    ]
    for command in commands:
        subprocess.run(command, cwd=PACKAGE, check=True, capture_output=True, timeout=300)
    wheel = next((tmp_path / "dist").glob("*.whl"))
    python = environment / "bin" / "python"
    install = ["uv", "pip", "install", "--python", str(python), str(wheel), f"torch=={rft_dist_torch_version()}"]
    subprocess.run(install, cwd=tmp_path, check=True, capture_output=True, timeout=600)
    listed = subprocess.run(
        ["uv", "pip", "list", "--python", str(python), "--format", "freeze"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    names = {line.split("==")[0] for line in listed.stdout.split()}
    assert "rft-dist" in names
    assert not names & {"numpy", "transformers", "deepspeed", "rft-engines", "rft-sync", "rft-trainer", "pytest"}
    assert "2 + 2 = sample 0" in run(str(python), BLOCKS[0], tmp_path)


def rft_dist_torch_version():
    import torch

    return torch.__version__.split("+")[0]
