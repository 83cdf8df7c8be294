"""Code blocks of the Markdown pages, and how each is run.

A `python` block runs by itself in a fresh process and an empty folder, without network. HTML comments right before
the fence change that:

- `<!-- needs: vllm -->` names modules (or `cuda`) without which the block is only compiled and its imports of this
  repository's packages are resolved;
- `<!-- runs -->` before a `bash` block runs it at the root of the repository; other `bash` blocks are prose.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from contracts.workspace import ROOT, files_below

TIMEOUT_SECONDS = 180
_COMMENT = re.compile(r"<!--\s*(needs|runs)\b:?\s*([^>]*?)\s*-->")

# Every interpreter started below a block imports this first, spawned ranks too.
_NETWORK_GUARD = """
import ipaddress
import socket

def _is_local(address):
    if not isinstance(address, tuple):
        return True
    try:
        return ipaddress.ip_address(address[0]).is_loopback
    except ValueError:
        return address[0] in ("localhost", "", socket.gethostname())

class _LocalSocket(socket.socket):
    def connect(self, address):
        if not _is_local(address):
            raise OSError(f"a documentation block may not use the network: {address}")
        return super().connect(address)

    def connect_ex(self, address):
        if not _is_local(address):
            raise OSError(f"a documentation block may not use the network: {address}")
        return super().connect_ex(address)

socket.socket = _LocalSocket
"""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced code block with the comment before it."""

    path: Path
    line: int
    language: str
    code: str
    needs: tuple[str, ...] = ()
    marked_to_run: bool = False

    @property
    def runs(self) -> bool:
        return self.language == "python" or (self.language == "bash" and self.marked_to_run)


def pages(root: Path = ROOT) -> list[Path]:
    """The Markdown pages of the repository; changelogs and their fragments hold no examples."""
    return [
        path for path in files_below(root, "*.md") if path.name != "CHANGELOG.md" and path.parent.name != "changelog.d"
    ]


def blocks_of(path: Path) -> list[Block]:
    """The fenced blocks of a page in order; `line` is that of the opening fence."""
    blocks = []
    comment: re.Match[str] | None = None
    for token in MarkdownIt("commonmark").parse(path.read_text(encoding="utf-8")):
        if token.type == "html_block":
            comment = _COMMENT.search(token.content)
        elif token.type == "fence":
            kind, words = comment.groups() if comment else ("", "")
            needs = tuple(filter(None, re.split(r"[,\s]+", words))) if kind == "needs" else ()
            language = (token.info.split() or [""])[0]
            blocks.append(
                Block(
                    path=path,
                    line=token.map[0] + 1,
                    language=language,
                    code=token.content,
                    needs=needs,
                    marked_to_run=kind == "runs",
                )
            )
            comment = None
        elif not token.hidden:
            comment = None
    return blocks


def missing_needs(block: Block) -> list[str]:
    """Those of `block.needs` that this environment lacks."""
    return [name for name in block.needs if not _is_present(name)]


def _is_present(name: str) -> bool:
    if name == "cuda":
        return Path("/dev/nvidiactl").exists()
    return importlib.util.find_spec(name) is not None


def imports_only(code: str, packages: Iterable[str]) -> str:
    """The statements of `code`, at any depth, that import from one of `packages`, dedented and in order."""
    tops = set(packages)

    def is_own(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom):
            return (node.module or "").split(".")[0] in tops
        return isinstance(node, ast.Import) and {alias.name.split(".")[0] for alias in node.names} <= tops

    return "".join(f"{ast.unparse(node)}\n" for node in ast.walk(ast.parse(code)) if is_own(node))


def run_block(
    block: Block,
    folder: Path,
    *,
    code: str | None = None,
    python: str = sys.executable,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> str:
    """Run a block, or `code` in its place, and return its output.

    A `python` block runs under the interpreter `python` with `folder` as working directory, a `bash` block at the
    root of the repository.

    Raises:
        AssertionError: the block failed or did not end in time; the message holds page, line and output.
    """
    guard = folder / "guard"
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(_NETWORK_GUARD, encoding="utf-8")
    place = f"{block.path}:{block.line}"
    if block.language == "bash":
        command, directory = ["bash", "-euo", "pipefail", "-c", block.code], ROOT
    else:
        script = folder / "block.py"
        script.write_text(block.code if code is None else code, encoding="utf-8")
        command, directory = [python, str(script)], folder
    with subprocess.Popen(
        command,
        cwd=directory,
        env=_environment(guard),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            raise AssertionError(f"{place}: not done after {timeout_seconds} s\n{output}") from error
    assert process.returncode == 0, f"{place}: exit code {process.returncode}\n{output}"
    return output


def _environment(guard: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(guard),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
