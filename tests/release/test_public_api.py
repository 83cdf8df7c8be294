"""The public interface of each package breaks nothing of the last release unless a fragment says so."""

from __future__ import annotations

import pytest

from contracts.workspace import Package, packages
from release.public_api import breakages, freeze, interface_of, is_announced, read_frozen

PACKAGES = packages()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_breaks_are_announced(package):
    rows = breakages(package.import_name, read_frozen(package), interface_of(package))
    told = "\n".join([f"{package.name} breaks its last release: add a changed or removed fragment", *rows])
    assert not rows or is_announced(package), told


INIT = 'from rft_x.plan import Plan, plan\n__all__ = ["Plan", "plan"]\n'
PLAN = '''
"""Doc."""
from dataclasses import dataclass

_LIMIT = 3

def plan(sizes: list[int], *, limit: int = 4) -> list[int]:
    """Doc."""
    return sizes[:limit]

def helper(x): ...

def _hidden(x): ...

@dataclass(frozen=True)
class Plan:
    """Doc."""
    sizes: tuple[int, ...]
    limit: int = 4

    def total(self, start: int = 0) -> int:
        """Doc."""
        return sum(self.sizes, start)

    def _own(self): ...
'''


@pytest.fixture
def interface(tmp_path):
    def of(init=INIT, plan=PLAN):
        source = tmp_path / "src" / "rft_x"
        source.mkdir(parents=True, exist_ok=True)
        (source / "__init__.py").write_text(init)
        (source / "plan.py").write_text(plan)
        return interface_of(Package(name="rft-x", folder=tmp_path))

    return of


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("def plan(", "def planned(", "rft_x.plan is no longer exported"),
        ("*, limit: int = 4) ->", "*, most: int = 4) ->", r"rft_x.plan.plan: Parameter was removed"),
        ("*, limit: int = 4) ->", "*, limit: int) ->", r"rft_x.plan.plan: Parameter is now required"),
        ("*, limit: int = 4) ->", "*, limit: int = 5) ->", r"rft_x.plan.plan: Parameter default was changed"),
        ("def total(", "def sum(", r"rft_x.plan.Plan.total: Public object was removed"),
        ("    limit: int = 4\n", "    most: int = 4\n", r"rft_x.plan.Plan"),
    ],
)
def test_planted_breaks_are_found(interface, old, new, told):
    assert old in PLAN
    rows = breakages("rft_x", interface(), interface(plan=PLAN.replace(old, new)))
    assert any(row.startswith(told) for row in rows), rows


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def helper(x)", "def helper(x, y)"),
        ("def _hidden(x)", "def _gone()"),
        ("_LIMIT = 3", "_LIMIT = 4"),
        ("def _own(self)", "def _other(self)"),
        ('"""Doc."""', '"""Words."""'),
        ("*, limit: int = 4) ->", "*, limit: int = 4, more: int = 0) ->"),
        ("return sizes[:limit]", "return sorted(sizes)[:limit]"),
    ],
)
def test_what_users_cannot_see_and_additions_are_no_breaks(interface, old, new):
    assert old in PLAN
    assert breakages("rft_x", interface(), interface(plan=PLAN.replace(old, new))) == []


def test_a_name_that_is_no_longer_exported_is_a_break(interface):
    rows = breakages("rft_x", interface(), interface(init=INIT.replace(", plan", "").replace(', "plan"', "")))
    assert rows == ["rft_x.plan is no longer exported"]


def test_a_name_may_move_to_another_module(interface, tmp_path):
    old = interface()
    (tmp_path / "src" / "rft_x" / "plans.py").write_text(PLAN)
    new = interface(init=INIT.replace("rft_x.plan ", "rft_x.plans "), plan="")
    assert breakages("rft_x", old, new) == []
    (tmp_path / "src" / "rft_x" / "plans.py").write_text(PLAN.replace("limit: int = 4) ->", "limit: int) ->"))
    (row,) = breakages("rft_x", old, interface(init=INIT.replace("rft_x.plan ", "rft_x.plans "), plan=""))
    assert "plan: Parameter is now required" in row


def test_only_changed_and_removed_fragments_announce(tmp_path):
    package = Package(name="rft-x", folder=tmp_path)
    assert not is_announced(package)
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "more.added.md").write_text("More.")
    (tmp_path / "changelog.d" / "less.fixed.md").write_text("Less.")
    assert not is_announced(package)
    (tmp_path / "changelog.d" / "other.changed.md").write_text("Other.")
    assert is_announced(package)


def test_a_frozen_interface_reads_back_as_it_was(tmp_path):
    (package, *_) = PACKAGES
    freeze(package, tmp_path)
    assert read_frozen(package, tmp_path) == interface_of(package)
