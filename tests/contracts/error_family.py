"""Whether the exceptions of a package form one family with standard-library bases and survive pickling."""

from __future__ import annotations

import ast
import builtins
import inspect
import pickle
import types
import typing
from pathlib import Path
from typing import Any

BUILTIN_ERRORS = frozenset(
    value
    for value in vars(builtins).values()
    if isinstance(value, type) and issubclass(value, Exception) and value is not Exception
)

_EXAMPLES: dict[Any, Any] = {str: "value", int: 3, float: 0.5, bool: True, bytes: b"x", Path: Path("x"), Any: "value"}
_CONTAINERS: dict[Any, Any] = {tuple: (), list: [], dict: {}, set: set(), frozenset: frozenset()}


def own_errors(module: types.ModuleType) -> list[type[Exception]]:
    """The exception classes that `module` itself defines."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == module.__name__
    ]


def family_violations(errors: list[type[Exception]]) -> list[str]:
    """Errors outside one family: exactly one base on `Exception` alone, all others below it and a built-in error."""
    bases = [error for error in errors if error.__bases__ == (Exception,)]
    if len(bases) != 1:
        return [f"expected one base error that derives from Exception alone, found {[b.__name__ for b in bases]}"]
    rows = []
    for error in errors:
        if error is bases[0]:
            continue
        if not issubclass(error, bases[0]):
            rows.append(f"{error.__name__} does not derive from {bases[0].__name__}")
        if not BUILTIN_ERRORS & set(error.__mro__):
            rows.append(f"{error.__name__} refines no built-in error; add ValueError, RuntimeError, TimeoutError, ...")
    return rows


def pickle_violations(error: type[Exception]) -> list[str]:
    """What one example of `error` loses when it crosses a process."""
    try:
        example = error(*_positional(error), **_keywords(error))
        copy = pickle.loads(pickle.dumps(example))
    except Exception as failure:  # noqa: BLE001  (whatever the constructor or pickle raises is the finding)
        return [f"{error.__name__} cannot be built from its annotations and pickled: {failure!r}"]
    same = type(copy) is error and str(copy) == str(example) and copy.__dict__ == example.__dict__
    return (
        [] if same else [f"{error.__name__} changes when pickled: {example!r} {vars(example)} -> {copy!r} {vars(copy)}"]
    )


def _parameters(error: type[Exception]) -> list[inspect.Parameter]:
    if error.__init__ in {base.__init__ for base in BUILTIN_ERRORS | {Exception}}:
        return [inspect.Parameter("message", inspect.Parameter.POSITIONAL_ONLY, annotation=str)]
    hints = typing.get_type_hints(error.__init__)
    rows = list(inspect.signature(error.__init__).parameters.values())[1:]
    return [row.replace(annotation=hints.get(row.name, str)) for row in rows]


def _positional(error: type[Exception]) -> list[Any]:
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }
    return [_example(row.annotation) for row in _parameters(error) if row.kind in kinds]


def _keywords(error: type[Exception]) -> dict[str, Any]:
    rows = _parameters(error)
    return {row.name: _example(row.annotation) for row in rows if row.kind is inspect.Parameter.KEYWORD_ONLY}


def _example(annotation: Any) -> Any:
    origin = typing.get_origin(annotation)
    if origin in {typing.Union, types.UnionType}:
        return _example(typing.get_args(annotation)[0])
    if origin is typing.Literal:
        return typing.get_args(annotation)[0]
    if annotation in _EXAMPLES:
        return _EXAMPLES[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseException):
        return annotation("cause")
    for container, example in _CONTAINERS.items():
        if inspect.isclass(origin or annotation) and issubclass(container, origin or annotation):
            return example
    raise TypeError(f"no example value for {annotation!r}; give the error plain arguments")


def stray_errors(path: Path, public: set[str]) -> list[str]:
    """Exception classes among the names of `public` that a module other than `errors.py` defines, by their bases."""
    builtin_names = {error.__name__ for error in BUILTIN_ERRORS} | {"Exception", "BaseException"}
    rows = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name in public:
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if any(base in builtin_names or base.endswith(("Error", "Exception")) for base in bases):
                rows.append(f"{path}:{node.lineno}: {node.name} belongs into errors.py")
    return rows
