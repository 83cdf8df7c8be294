"""Every code block of every page runs by itself."""

from __future__ import annotations

import pytest

from contracts.arrows import FIVE
from contracts.documents import Block, blocks_of, imports_only, missing_needs, pages, run_block
from contracts.workspace import ROOT, packages, shown

BLOCKS = [block for page in pages() for block in blocks_of(page) if block.runs]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{shown(block.path)}:{block.line}")
def test_block_runs(block, tmp_path):
    missing = missing_needs(block)
    if missing:
        compile(block.code, f"{block.path}:{block.line}", "exec")
        run_block(block, tmp_path, code=imports_only(block.code, FIVE))
        pytest.skip(f"compiled and its own imports resolved; not run without {', '.join(missing)}")
    run_block(block, tmp_path)


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_package_readme_shows_code_that_runs(package):
    readme = package.folder / "README.md"
    assert [block for block in blocks_of(readme) if block.runs], f"{shown(readme)}: no python block"


def test_pages_are_those_of_the_repository():
    assert ROOT / "CONTRIBUTING.md" in pages()
    assert not [page for page in pages() if page.name == "CHANGELOG.md"]


PAGE = """# Page

```python
print("one")
```

- in a list

  ```python title="two"
  print("two")
  ```

<!-- needs: vllm, not_there -->
```python
import not_there
```

<!-- runs -->

```bash
true
```

<!-- needs: not_there -->
Prose ends the reach of a comment.

```python
print("three")
```

```bash
false
```
"""


def test_blocks_are_found_with_their_comments(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = [(block.line, block.language, block.needs, block.runs) for block in blocks_of(page)]
    assert found == [
        (3, "python", (), True),
        (9, "python", (), True),
        (14, "python", ("vllm", "not_there"), True),
        (20, "bash", (), True),
        (27, "python", (), True),
        (31, "bash", (), False),
    ]
    assert "not_there" in missing_needs(blocks_of(page)[2])


def _block(code, language="python"):
    return Block(path=ROOT / "page.md", line=3, language=language, code=code, marked_to_run=True)


def test_block_runs_alone_in_an_empty_folder(tmp_path):
    code = "import os, sys\nprint(os.getcwd(), sorted(os.listdir()), __name__)\n"
    assert run_block(_block(code), tmp_path) == f"{tmp_path} ['block.py', 'guard'] __main__\n"


@pytest.mark.parametrize(("code", "language"), [("raise SystemExit(3)", "python"), ("false | true", "bash")])
def test_failing_block_is_named(tmp_path, code, language):
    with pytest.raises(AssertionError, match=r"page\.md:3: exit code [13]"):
        run_block(_block(code, language), tmp_path)


def test_hanging_block_is_ended(tmp_path):
    with pytest.raises(AssertionError, match="not done after"):
        run_block(_block("sleep 60", "bash"), tmp_path, timeout_seconds=0.2)


def test_network_is_refused_and_loopback_is_not(tmp_path):
    listening = """
import socket
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname()).close()
try:
    socket.socket().connect(("192.0.2.1", 80))
except OSError as error:
    print(error)
"""
    assert "may not use the network: ('192.0.2.1', 80)" in run_block(_block(listening), tmp_path)


def test_imports_only_keeps_the_imports_of_the_named_packages():
    code = "import os\nfrom rft_sync import A, B as C\nimport rft_dist\ndef f():\n    from rft_sync.plan import D\n"
    kept = imports_only(code, {"rft_sync", "rft_dist"})
    assert sorted(kept.splitlines()) == [
        "from rft_sync import A, B as C",
        "from rft_sync.plan import D",
        "import rft_dist",
    ]
