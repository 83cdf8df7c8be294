"""Reading signatures in the source of an engine's wheel, without importing it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from release.wheels import uv

_KINDS = inspect.Parameter


@dataclass(frozen=True, kw_only=True)
class EngineSource:
    """The unpacked wheel of an engine.

    Attributes:
        name: of the distribution, which is that of its package.
        version: its version.
        folder: where the package lies.
    """

    name: str
    version: str
    folder: Path

    def module(self, dotted: str) -> ast.Module | None:
        """The module's syntax tree; None where there is no such module."""
        base = self.folder.joinpath(*dotted.split("."))
        path = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
        return None if path is None else ast.parse(path.read_text(encoding="utf-8"))

    def provides(self, dotted: str, name: str) -> bool:
        """Whether `from dotted import name` finds something: a definition, an import, a submodule or a lazy name."""
        module = self.module(dotted)
        if module is None:
            return False
        lazily = {node.value for node in ast.walk(module) if isinstance(node, ast.Constant)}
        if name in set(_defined(module)) or name in lazily or self.module(f"{dotted}.{name}") is not None:
            return True
        return any(self.provides(origin, name) for origin in _star_origins(module))

    def signature(self, path: str) -> inspect.Signature | None:
        """Signature of the function or method at `package.module:name` or `package.module:Class.name`, without self."""
        dotted, _, inside = path.partition(":")
        owner, _, name = inside.rpartition(".")
        if not owner:
            body = getattr(self.module(dotted), "body", [])
            found = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)
            return None if found is None else _signature(found, skip=0)
        for cls in self._classes(dotted, owner):
            for node in cls.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                    return _signature(node, skip=1)
        return None

    def fields(self, path: str) -> set[str]:
        """Annotated fields of the class at `package.module:Class`, those of its bases included."""
        dotted, _, name = path.partition(":")
        return {
            node.target.id
            for cls in self._classes(dotted, name)
            for node in cls.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }

    def all_fields(self, dotted: str) -> set[str]:
        """Annotated fields of every class in the modules of a package, if there is such a package."""
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in self._files(dotted)]
        classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        rows = [node.target for cls in classes for node in cls.body if isinstance(node, ast.AnnAssign)]
        return {row.id for row in rows if isinstance(row, ast.Name)}

    def _files(self, dotted: str) -> list[Path]:
        return sorted(self.folder.joinpath(*dotted.split(".")).glob("*.py"))

    def _classes(self, dotted: str, name: str) -> Iterator[ast.ClassDef]:
        """The class and its bases in the engine's own source, in the order in which Python asks them, about."""
        module = self.module(dotted)
        for node in getattr(module, "body", []):
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield node
                for base in node.bases:
                    if isinstance(base, ast.Name):
                        yield from self._classes(_origin(module, dotted, base.id), base.id)


def unpacked(name: str, version: str, folder: Path) -> EngineSource:
    """The wheel of `name` at `version` from the index, unpacked into `folder`; an index is needed."""
    wanted = f"{name}=={version}"
    target = ("--target", str(folder), "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_35")
    uv("pip", "install", "--quiet", "--no-deps", "--no-build", *target, wanted, timeout_seconds=3000)
    return EngineSource(name=name, version=version, folder=folder)


def bound(call: ast.Call, signature: inspect.Signature) -> str:
    """Why `call` does not fit `signature`; an empty text where it does."""
    try:
        signature.bind(*call.args, **{word.arg: word.value for word in call.keywords if word.arg is not None})
    except TypeError as error:
        return str(error)
    return ""


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, skip: int) -> inspect.Signature:
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    first_default = len(positional) - len(given.defaults)
    rows = [
        _KINDS(
            argument.arg,
            _KINDS.POSITIONAL_ONLY if argument in given.posonlyargs else _KINDS.POSITIONAL_OR_KEYWORD,
            default=None if place >= first_default else _KINDS.empty,
        )
        for place, argument in enumerate(positional)
    ][skip:]
    if given.vararg is not None:
        rows.append(_KINDS(given.vararg.arg, _KINDS.VAR_POSITIONAL))
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        rows.append(_KINDS(argument.arg, _KINDS.KEYWORD_ONLY, default=_KINDS.empty if default is None else None))
    if given.kwarg is not None:
        rows.append(_KINDS(given.kwarg.arg, _KINDS.VAR_KEYWORD))
    return inspect.Signature(rows)


def _defined(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _star_origins(module: ast.Module) -> list[str]:
    return [
        node.module or ""
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and node.level == 0 and [alias.name for alias in node.names] == ["*"]
    ]


def _origin(module: ast.Module | None, dotted: str, name: str) -> str:
    """The module that `name` comes from."""
    for node in getattr(module, "body", []):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return node.module or dotted
    return dotted
