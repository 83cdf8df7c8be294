"""The public names of the packages, read from the sources without importing them."""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from contracts.workspace import ROOT, Package, packages

FROZEN = Path(__file__).with_name("public_names.json")
REFRESH = "python tests/contracts/refresh.py"


def declared_names(path: Path) -> list[str] | None:
    """The literal `__all__` of a module, None when it declares none.

    Raises:
        ValueError: `__all__` is not a literal list of strings.
    """
    return names_declared_by(path.read_text(encoding="utf-8"), path)


def names_declared_by(source: str, path: object) -> list[str] | None:
    """`declared_names` of a module's text; `path` is for the message."""
    for node in ast.parse(source).body:
        if _assigned_name(node) == "__all__":
            try:
                names = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            except ValueError as error:
                raise ValueError(f"{path}:{node.lineno}: __all__ is computed; write it as a literal list") from error
            return list(names)
    return None


def public_names(package: Package) -> dict[str, list[str]]:
    """Module name -> sorted `__all__`, for each public module of the package that declares one.

    A module is public when no part of its dotted name begins with an underscore.
    """
    surface = {}
    for path in package.modules:
        parts = [package.import_name, *path.relative_to(package.source).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        names = declared_names(path)
        if names is not None and not any(part.startswith("_") for part in parts):
            surface[".".join(parts)] = sorted(names)
    return surface


def surface_of(root: Path = ROOT) -> dict[str, dict[str, list[str]]]:
    """Package name -> its `public_names`."""
    return {package.name: public_names(package) for package in packages(root)}


def read_frozen(path: Path = FROZEN) -> dict[str, dict[str, list[str]]]:
    """The surface that was frozen last."""
    return json.loads(path.read_text(encoding="utf-8"))


def written(surface: Mapping[str, object]) -> str:
    """The text of the frozen file."""
    return json.dumps(surface, indent=2, sort_keys=True) + "\n"


def surface_difference(frozen: Mapping[str, list[str]], current: Mapping[str, list[str]]) -> list[str]:
    """Unified diff of two surfaces of one package, one `module:name` a line; empty when they are equal."""
    rows = [
        sorted(f"{module}:{name}" for module, names in surface.items() for name in names)
        for surface in (frozen, current)
    ]
    lines = difflib.unified_diff(*rows, "frozen", "tree", n=0, lineterm="")
    return [line for line in lines if not line.startswith("@@")]


def init_violations(path: Path) -> list[str]:
    """Statements of an `__init__.py` that are neither docstring, re-export nor `__all__`, and names that disagree.

    The order of `__all__` is the linter's rule RUF022 and is not repeated here.
    """
    body = ast.parse(path.read_text(encoding="utf-8")).body
    rows = []
    imported: list[str] = []
    for index, node in enumerate(body):
        if isinstance(node, ast.ImportFrom):
            imported += [alias.asname or alias.name for alias in node.names if node.module != "__future__"]
        elif _assigned_name(node) != "__all__" and not (index == 0 and _is_docstring(node)):
            rows.append(f"{path}:{node.lineno}: {type(node).__name__} in __init__; move it into a module")
    return rows + _disagreements(path, imported)


def _disagreements(path: Path, imported: Iterable[str]) -> list[str]:
    names = declared_names(path)
    if names is None:
        return [f"{path}: no __all__; declare the re-exported names"]
    repeated = {name for name in names if names.count(name) > 1}
    return [
        *(f"{path}: {name} stands twice in __all__" for name in sorted(repeated)),
        *(f"{path}: {name} is imported but not in __all__" for name in sorted(set(imported) - set(names))),
        *(f"{path}: {name} is in __all__ but not imported" for name in sorted(set(names) - set(imported))),
    ]


def _assigned_name(node: ast.stmt) -> str | None:
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else None


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
