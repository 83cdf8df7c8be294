"""The code of the README runs, and importing the package is light."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_block_runs(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_import_needs_torch_and_the_standard_library_only():
    code = (
        "import sys, rft_sync, rft_sync.testing\n"
        "heavy = {'transformers', 'deepspeed', 'peft', 'vllm', 'sglang', 'safetensors', 'rft_dist', 'rft_engines'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
