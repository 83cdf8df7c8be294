"""Limits of length and names of modules."""

from __future__ import annotations

import ast
from pathlib import Path

MODULE_LINES = 400
FUNCTION_LINES = 60
REFUSED_NAMES = frozenset({"common", "helper", "helpers", "misc", "util", "utils"})


def module_length_violations(path: Path) -> list[str]:
    """A module must stay under `MODULE_LINES` lines."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    return [f"{path}: {lines} lines; split it below {MODULE_LINES}"] if lines >= MODULE_LINES else []


def function_length_violations(path: Path) -> list[str]:
    """Each function must stay under `FUNCTION_LINES` lines, counted from `def` to its last line."""
    rows = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if lines >= FUNCTION_LINES:
                rows.append(f"{path}:{node.lineno}: {node.name} has {lines} lines; split it below {FUNCTION_LINES}")
    return rows


def name_violations(path: Path, root: Path) -> list[str]:
    """No module or folder below `root` may be named after what it is not: `utils`, `loss_helpers`, ..."""
    parts = path.relative_to(root).with_suffix("").parts
    words = {word for part in parts for word in part.strip("_").lower().replace("-", "_").split("_")}
    return [f"{path}: the name holds {word!r}; name the noun it serves" for word in sorted(words & REFUSED_NAMES)]
