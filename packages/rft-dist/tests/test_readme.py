import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rft_dist

PACKAGE = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)


# torch's own complaint where numpy is missing
NO_NUMPY = "ignore:Failed to initialize NumPy:UserWarning"
RANKS = """
from rft_dist import Sum, all_reduce_metrics, gather_inputs
from rft_dist.testing import run_ranks

def total(rank, world_size):
    gathered, plan = gather_inputs([{"rank": rank}] * rank, None)
    return all_reduce_metrics({"ranks": Sum(rank)})["ranks"], len(gathered), plan.offset

if __name__ == "__main__":
    print(run_ranks(total, 2))
"""


def run(python, code, folder):
    script = folder / "script.py"
    script.write_text(code)
    command = [str(python), "-W", "error", "-W", NO_NUMPY, script.name]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def output_of(*command, folder=PACKAGE):
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=600).stdout


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
    output_of("uv", "build", "--package", "rft-dist", "--wheel", "--no-sources", "--out-dir", str(tmp_path / "dist"))
    output_of("uv", "venv", "--python", sys.executable, str(tmp_path / "environment"))
    wheel = next((tmp_path / "dist").glob("*.whl"))
    python = str(tmp_path / "environment" / "bin" / "python")
    torch_version = torch.__version__.split("+")[0]
    output_of("uv", "pip", "install", "--python", python, str(wheel), f"torch=={torch_version}", folder=tmp_path)
    listed = output_of("uv", "pip", "list", "--python", python, "--format", "freeze", folder=tmp_path)
    names = {line.split("==")[0] for line in listed.split()}
    assert "rft-dist" in names
    assert not names & {"numpy", "transformers", "deepspeed", "rft-engines", "rft-sync", "rft-trainer", "pytest"}
    assert "2 + 2 = sample 0" in run(python, BLOCKS[0], tmp_path)
    assert run(python, RANKS, tmp_path) == "[(1.0, 1, 0), (1.0, 1, 0)]\n"
