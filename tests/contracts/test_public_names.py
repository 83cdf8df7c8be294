"""The public names are frozen, and an `__init__` is a table of contents."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from contracts.surface import (
    FROZEN,
    REFRESH,
    declared_names,
    init_violations,
    public_names,
    read_frozen,
    surface_difference,
    surface_of,
    written,
)
from contracts.workspace import ROOT, packages

PACKAGES = packages()
by_name = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def test_the_frozen_file_lists_exactly_the_packages_in_canonical_form():
    frozen = read_frozen()
    assert sorted(frozen) == [package.name for package in PACKAGES]
    assert FROZEN.read_text(encoding="utf-8") == written(frozen)


@by_name
def test_public_names_are_the_frozen_ones(package):
    rows = surface_difference(read_frozen()[package.name], public_names(package))
    assert not rows, "\n".join([f"public names of {package.name} changed; if meant: {REFRESH}", *rows])


@by_name
def test_inits_hold_only_re_exports(package):
    rows = [row for path in package.modules if path.name == "__init__.py" for row in init_violations(path)]
    assert not rows, "\n".join(rows)


def test_the_linter_keeps_every_dunder_all_sorted(tmp_path):
    planted = tmp_path / "__init__.py"
    planted.write_text('"""Doc."""\n\n__all__ = ["b", "a"]\n')
    sources = [str(package.source) for package in PACKAGES]
    assert _unsorted([str(planted)]).returncode == 1
    done = _unsorted(sources)
    assert done.returncode == 0, done.stdout


def _unsorted(paths):
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--output-format",
        "concise",
        "--select",
        "RUF022",
        *paths,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_new_and_a_lost_name_show_in_the_diff():
    rows = surface_difference({"rft_x": ["Kept", "Lost"]}, {"rft_x": ["Kept"], "rft_x.testing": ["new"]})
    assert rows == ["--- frozen", "+++ tree", "+rft_x.testing:new", "-rft_x:Lost"]
    assert surface_difference({"rft_x": ["A"]}, {"rft_x": ["A"]}) == []


def test_surface_reads_public_modules_only(tmp_path):
    source = tmp_path / "packages" / "rft-x" / "src" / "rft_x"
    source.mkdir(parents=True)
    (tmp_path / "packages" / "rft-x" / "pyproject.toml").write_text("")
    (source / "__init__.py").write_text('from rft_x.plan import plan\n__all__: list[str] = ["plan"]\n')
    (source / "testing.py").write_text('__all__ = ["z", "a"]\n')
    (source / "_private.py").write_text('__all__ = ["hidden"]\n')
    (source / "plan.py").write_text("def plan(): ...\n")
    assert surface_of(tmp_path) == {"rft-x": {"rft_x": ["plan"], "rft_x.testing": ["a", "z"]}}
    assert json.loads(written(surface_of(tmp_path))) == surface_of(tmp_path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('"""Doc."""\nfrom a import b\n__all__ = ["b"]\nVERSION = 1\n', "Assign in __init__"),
        ("import os\n__all__ = []\n", "Import in __init__"),
        ("__all__ = []\ndef __getattr__(name): ...\n", "FunctionDef in __init__"),
        ('from a import b, c\n__all__ = ["b"]\n', "c is imported but not in __all__"),
        ('from a import b\n__all__ = ["b", "d"]\n', "d is in __all__ but not imported"),
        ('from a import b\n__all__ = ["b", "b"]\n', "b stands twice"),
        ('"""Doc."""\n', "no __all__"),
    ],
)
def test_planted_init_is_a_violation(tmp_path, text, complaint):
    path = tmp_path / "__init__.py"
    path.write_text(text)
    assert any(complaint in row for row in init_violations(path))


def test_clean_init_passes_and_a_computed_one_is_refused(tmp_path):
    path = tmp_path / "__init__.py"
    path.write_text('"""Doc."""\n\nfrom a.b import C as D\n\n__all__ = ["D"]\n')
    assert init_violations(path) == []
    path.write_text("names = []\n__all__ = sorted(names)\n")
    with pytest.raises(ValueError, match="literal list"):
        declared_names(path)
