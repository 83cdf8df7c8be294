"""Modules and functions stay small and are named after nouns of the domain."""

from __future__ import annotations

import pytest

from contracts.sizes import function_length_violations, module_length_violations, name_violations
from contracts.workspace import ROOT, files_below

TOPS = [ROOT / name for name in ("packages", "apps", "benchmarks", "tests")]
MODULES = [path for top in TOPS if top.is_dir() for path in files_below(top, "*.py")]


def _is_test(path):
    return "tests" in path.relative_to(ROOT).parts


def test_modules_are_found():
    assert {"src", "tests"} <= {part for path in MODULES for part in path.relative_to(ROOT).parts}


def test_modules_are_short():
    rows = [row for path in MODULES for row in module_length_violations(path)]
    assert not rows, "\n".join(rows)


def test_functions_are_short():
    rows = [row for path in MODULES if not _is_test(path) for row in function_length_violations(path)]
    assert not rows, "\n".join(rows)


def test_names_are_nouns_of_the_domain():
    rows = [row for path in MODULES for row in name_violations(path, ROOT)]
    assert not rows, "\n".join(rows)


@pytest.mark.parametrize(("lines", "count"), [(399, 0), (400, 1)])
def test_module_limit(tmp_path, lines, count):
    path = tmp_path / "planned.py"
    path.write_text("x = 1\n" * lines)
    assert len(module_length_violations(path)) == count


@pytest.mark.parametrize(("lines", "count"), [(59, 0), (60, 1)])
@pytest.mark.parametrize("head", ["def f():", "async def f():", "class C:\n  def f(self):"])
def test_function_limit(tmp_path, head, lines, count):
    path = tmp_path / "planned.py"
    path.write_text(head + "\n" + "    x = 1\n" * (lines - 1))
    assert len(function_length_violations(path)) == count


@pytest.mark.parametrize("name", ["utils.py", "loss_helpers.py", "common/groups.py", "_misc.py", "text-util.py"])
def test_refused_names(tmp_path, name):
    assert len(name_violations(tmp_path / name, tmp_path)) == 1


@pytest.mark.parametrize("name", ["buckets.py", "utility_model/loss.py", "commonsense.py"])
def test_accepted_names(tmp_path, name):
    assert name_violations(tmp_path / name, tmp_path) == []
