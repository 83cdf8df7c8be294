"""The public interface of a package against the one that users have: what its last release froze.

A package's frozen interface is `public_api/<package>.json`: its modules with bodies, docstrings and private names taken
away. A release writes it anew; before the first release it is the interface that landed first, written by running this
file. griffe compares the two.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contracts.package_files import has_release
from contracts.surface import names_declared_by
from contracts.workspace import Package, packages

FROZEN = Path(__file__).with_name("public_api")
ANNOUNCING_KINDS = ("changed", "removed")

Interface = Mapping[str, str]
"""Path of a module inside the package -> its source without bodies."""


def interface_of(package: Package) -> Interface:
    """The interface in the tree."""
    return {
        path.relative_to(package.source).as_posix(): ast.unparse(
            ast.fix_missing_locations(_Outline().visit(ast.parse(path.read_text(encoding="utf-8"))))
        )
        for path in package.modules
    }


def read_frozen(package: Package, folder: Path = FROZEN) -> Interface:
    """The interface of the last release."""
    stored = json.loads((folder / f"{package.name}.json").read_text(encoding="utf-8"))
    return {path: "\n".join(lines) for path, lines in stored.items()}


def freeze(package: Package, folder: Path = FROZEN) -> Path:
    """Write the interface in the tree as the one that later ones are compared with."""
    lines = {path: source.split("\n") for path, source in interface_of(package).items()}
    target = folder / f"{package.name}.json"
    target.write_text(json.dumps(lines, indent=0, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    return target


def breakages(name: str, old: Interface, new: Interface) -> list[str]:
    """What users of `old` would miss in `new`, one line each: names in an `__all__`, their parameters and members.

    Args:
        name: import name of the package.
        old: the interface that users have.
        new: the interface to come.
    """
    with _loaded(name, old) as before, _loaded(name, new) as after:
        had, have = _exports(name, old, before), _exports(name, new, after)
        for export in had.keys() & have.keys():
            if have[export].path != had[export].path:
                _show_at(after, had[export].path, have[export])
        covered = {side[export].path for side in (had, have) for export in had.keys() & have.keys()}
        changed = {_shown(row) for row in griffe.find_breaking_changes(before, after) if _top(row.obj).path in covered}
    return sorted({f"{export} is no longer exported" for export in had.keys() - have.keys()} | changed)


def is_announced(package: Package) -> bool:
    """Whether a fragment tells users that something they have changes or goes."""
    names = [path.name for path in (package.folder / "changelog.d").glob("*.md")]
    return any(name.endswith(f".{kind}.md") for name in names for kind in ANNOUNCING_KINDS)


def _loaded(name: str, interface: Interface) -> AbstractContextManager[griffe.Module]:
    return griffe.temporary_visited_package(name, modules=interface, init=False, resolve_aliases=True)


def _exports(name: str, interface: Interface, package: griffe.Module) -> dict[str, griffe.Object]:
    """Path of each name in an `__all__` -> what it stands for."""
    found = {}
    for path, source in interface.items():
        module = ".".join([name, *Path(path).with_suffix("").parts]).removesuffix(".__init__")
        for exported in names_declared_by(source, path) or ():
            holder = package.modules_collection.get_member(module)
            # By its import: a module may be called like what it defines.
            target = holder.imports.get(exported, f"{module}.{exported}")
            try:
                here = package.modules_collection.get_member(target)
            except KeyError:
                continue  # nothing defines it
            found[f"{module}.{exported}"] = here.final_target if isinstance(here, griffe.Alias) else here
    return found


def _show_at(package: griffe.Module, path: str, moved: griffe.Object) -> None:
    """Let something that moved be found where it was, so that it is compared with what it was there."""
    _, *modules, leaf = path.split(".")
    holder = package
    for part in modules:
        if part not in holder.members or not holder.members[part].is_module:
            holder.members.pop(part, None)
            holder.set_member(part, griffe.Module(part))
        holder = holder.members[part]  # type: ignore[assignment]
    holder.members[leaf] = moved  # no alias: griffe skips one whose counterpart is none


def _top(item: griffe.Object | griffe.Alias) -> griffe.Object | griffe.Alias:
    """The class or function of a module that `item` is, or is inside of."""
    while item.parent is not None and not item.parent.is_module:
        item = item.parent
    return item


def _shown(breakage: griffe.Breakage) -> str:
    values = (str(breakage.old_value), str(breakage.new_value))
    change = "" if breakage.kind is griffe.BreakageKind.OBJECT_REMOVED else f": {' -> '.join(values)}"
    return f"{breakage.obj.path}: {breakage.kind.value}{change}"


class _Outline(ast.NodeTransformer):
    """Takes away bodies, docstrings and private definitions."""

    def visit_Module(self, node: ast.Module) -> ast.Module:
        node.body = self._kept(node.body)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.body = self._kept(node.body) or [ast.Expr(ast.Constant(...))]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = [ast.Expr(ast.Constant(...))]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815

    def _kept(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [self.visit(node) for node in body if not _is_private(node)]


def _is_private(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):  # docstrings, and calls that an interface does not show
        return True
    if isinstance(node, ast.Assign):
        name = getattr(node.targets[0], "id", "_")
    else:
        name = getattr(node, "name", None) or getattr(getattr(node, "target", None), "id", "")
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


if __name__ == "__main__":
    for unreleased in packages():
        if not has_release(unreleased):
            print(f"froze {freeze(unreleased)}")
