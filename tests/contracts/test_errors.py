"""Each package has one family of errors that callers can catch by either parent and that cross processes."""

from __future__ import annotations

import importlib
import types

import pytest

from contracts.error_family import family_violations, own_errors, pickle_violations, stray_errors
from contracts.surface import public_names
from contracts.workspace import packages

PACKAGES = packages()
by_name = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


@by_name
def test_errors_are_one_family_and_picklable(package):
    errors = own_errors(importlib.import_module(f"{package.import_name}.errors"))
    rows = family_violations(errors) + [row for error in errors for row in pickle_violations(error)]
    assert not rows, "\n".join(rows)


@by_name
def test_public_errors_are_defined_in_one_module(package):
    # A conformance kit reports to a test run: what `testing` raises is no member of the family.
    surface = {module: names for module, names in public_names(package).items() if ".testing" not in module}
    public = {name for names in surface.values() for name in names}
    others = [path for path in package.modules if path != package.source / "errors.py"]
    rows = [row for path in others for row in stray_errors(path, public)]
    assert not rows, "\n".join(rows)


class FamilyError(Exception):
    """Base of the planted family."""


class GoodError(FamilyError, ValueError):
    """A member with a keyword of its own that survives pickling."""

    def __init__(self, message: str, *, rank: int | None = None, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.names = names

    def __reduce__(self):
        return (_rebuilt, (self.args[0], self.rank, self.names))


def _rebuilt(message, rank, names):
    return GoodError(message, rank=rank, names=names)


class OrphanError(ValueError):
    """Outside the family."""


class PlainError(FamilyError):
    """Refines no built-in error."""


class LostArgumentError(FamilyError, RuntimeError):
    """Cannot be rebuilt: pickle calls it with one argument."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(f"{name} {count}")


class ChangedError(FamilyError, RuntimeError):
    """Doubles its prefix when it is rebuilt."""

    def __init__(self, name: str) -> None:
        super().__init__(f"name: {name}")


class OpaqueError(FamilyError, RuntimeError):
    """Needs an object that no example exists for."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(str(module))


def test_a_good_family_passes():
    assert family_violations([FamilyError, GoodError]) == []
    assert pickle_violations(FamilyError) + pickle_violations(GoodError) == []


@pytest.mark.parametrize(
    ("error", "complaint"),
    [(OrphanError, "does not derive from FamilyError"), (PlainError, "refines no built-in error")],
)
def test_planted_relative_is_a_violation(error, complaint):
    (row,) = family_violations([FamilyError, GoodError, error])
    assert complaint in row


@pytest.mark.parametrize("errors", [[], [GoodError], [FamilyError, type("SecondError", (Exception,), {})]])
def test_a_family_has_exactly_one_base(errors):
    (row,) = family_violations(errors)
    assert "expected one base error" in row


@pytest.mark.parametrize(
    ("error", "complaint"),
    [(LostArgumentError, "cannot be built"), (ChangedError, "changes when pickled"), (OpaqueError, "no example value")],
)
def test_planted_unpicklable_error_is_a_violation(error, complaint):
    (row,) = pickle_violations(error)
    assert complaint in row


def test_own_errors_leaves_out_imported_ones():
    module = types.ModuleType("planted")
    local = type("LocalError", (Exception,), {"__module__": "planted"})
    module.LocalError, module.GoodError = local, GoodError
    assert own_errors(module) == [local]


def test_planted_stray_error_is_a_violation(tmp_path):
    path = tmp_path / "planned.py"
    path.write_text("class Lost(ValueError): ...\nclass Inner(Exception): ...\nclass Table(dict): ...\n")
    assert stray_errors(path, {"Lost", "Table"}) == [f"{path}:1: Lost belongs into errors.py"]
