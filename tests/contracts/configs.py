"""Which classes are configurations, and whether they are frozen and keyword-only."""

from __future__ import annotations

import ast
from pathlib import Path

SUFFIXES = ("Config", "Options", "Params", "Settings")
REQUIRED = ("frozen", "kw_only")


def config_violations(path: Path) -> list[str]:
    """Dataclasses named like a configuration without `frozen=True, kw_only=True`.

    A class counts as one when its name ends in one of `SUFFIXES` and it is decorated as a dataclass.
    """
    rows = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name.endswith(SUFFIXES):
            for decorator in node.decorator_list:
                if _name(decorator) == "dataclass":
                    missing = [word for word in REQUIRED if word not in _true_keywords(decorator)]
                    rows += [f"{path}:{node.lineno}: {node.name} lacks {word}=True" for word in missing]
    return rows


def _name(decorator: ast.expr) -> str | None:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def _true_keywords(decorator: ast.expr) -> set[str | None]:
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    return {word.arg for word in keywords if isinstance(word.value, ast.Constant) and word.value.value is True}
