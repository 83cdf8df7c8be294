"""The code of the README runs, and importing the package is light."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[1] / "README.md").read_text()
# A block that needs more than torch says so in a comment before it.
BLOCKS = [
    block for needs, block in re.findall(r"(<!-- needs: .*?-->\n)?```python\n(.*?)```", TEXT, re.DOTALL) if not needs
]


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
