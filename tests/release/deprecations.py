"""Deprecations in the sources: each says when it ends, and none outlives one minor version."""

from __future__ import annotations

import ast
import re

from packaging.version import Version

from contracts.workspace import Package, shown


def deprecation_violations(package: Package) -> list[str]:
    """Warnings of the package's own that name no end, a late one, or one that has come."""
    current = Version(package.pyproject["project"]["version"])
    following = (current.major, current.minor + 1)
    ends = re.compile(rf"removed in {re.escape(package.name)} (\d+)\.(\d+)\b")
    rows = []
    for path in package.modules:
        for call in _deprecations(ast.parse(path.read_text(encoding="utf-8"))):
            place = f"{shown(path)}:{call.lineno}"
            found = ends.search(" ".join(_texts(call)))
            if found is None:
                end = f"{following[0]}.{following[1]}"
                rows.append(f"{place}: say what to use instead and 'removed in {package.name} {end}'")
            elif (end := (int(found[1]), int(found[2]))) < following:
                rows.append(f"{place}: its end has come with {current}: remove it, with a removed fragment")
            elif end > following and end != (current.major + 1, 0):
                rows.append(f"{place}: it lasts longer than one minor version after {current}")
            if not any(word.arg == "stacklevel" for word in call.keywords):
                rows.append(f"{place}: give stacklevel, so that the warning shows the user's line, once for each")
    return rows


def _deprecations(module: ast.Module) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] == "warn"
        and any(isinstance(part, ast.Name) and part.id.endswith("DeprecationWarning") for part in ast.walk(node))
    ]


def _texts(call: ast.Call) -> list[str]:
    constants = (node.value for node in ast.walk(call) if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str)]
