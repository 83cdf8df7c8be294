"""Every import statement of a module, wherever it stands."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """When an import statement runs."""

    MODULE = "at module level"
    FUNCTION = "inside a function"
    TYPING = "under TYPE_CHECKING"


@dataclass(frozen=True)
class ImportSite:
    """One imported module name with its place."""

    module: str
    line: int
    scope: Scope
    names: tuple[str, ...] = ()  # what `from module import ...` takes, which may be modules themselves

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


class _ImportVisitor(ast.NodeVisitor):
    def __init__(self) -> None:
        self.sites: list[ImportSite] = []
        self._scope = Scope.MODULE

    def _add(self, module: str, line: int, names: tuple[str, ...] = ()) -> None:
        self.sites.append(ImportSite(module, line, self._scope, names))

    def _visit_within(self, scope: Scope, nodes: list[ast.stmt] | list[ast.AST]) -> None:
        outer, self._scope = self._scope, scope
        for node in nodes:
            self.visit(node)
        self._scope = outer

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        names = tuple(alias.name for alias in node.names)
        self._add("." * node.level + (node.module or ""), node.lineno, names)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        # Decorators and defaults run with the surrounding scope, the body when the function is called.
        for expression in [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(expression)
        self._visit_within(Scope.TYPING if self._scope is Scope.TYPING else Scope.FUNCTION, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  (the name that NodeVisitor calls)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_within(Scope.FUNCTION, [node.body])

    def visit_If(self, node: ast.If) -> None:
        if _is_type_checking(node.test):
            self._visit_within(Scope.TYPING, node.body)
            self._visit_within(self._scope, node.orelse)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _called_name(node) in {"import_module", "__import__"} and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                self._add(argument.value, node.lineno)
        self.generic_visit(node)


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def _called_name(node: ast.Call) -> str | None:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def import_sites(text: str) -> list[ImportSite]:
    """Imports of a module's source text: statements, and `import_module`/`__import__` calls with a literal name.

    A relative import keeps its leading dots, so that it never looks like an absolute one.
    """
    visitor = _ImportVisitor()
    visitor.visit(ast.parse(text))
    return visitor.sites
