"""A deprecation says what to use instead and when it ends, and it ends one minor version later."""

from __future__ import annotations

import subprocess
import sys

import pytest

from contracts.workspace import Package, packages
from release.deprecations import deprecation_violations


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_deprecations_end_in_time(package):
    assert deprecation_violations(package) == []


WARNING = 'warnings.warn("use plan(); removed in rft-x {end}", DeprecationWarning, stacklevel=2)'


def planted(folder, statement, version):
    source = folder / "src" / "rft_x"
    source.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "rft-x"\nversion = "{version}"\n')
    (source / "old.py").write_text(f"import warnings\n\ndef old_plan():\n    {statement}\n    return 3\n")
    return Package(name="rft-x", folder=folder)


@pytest.mark.parametrize(
    ("statement", "version", "complaint"),
    [
        (WARNING.format(end="0.3"), "0.2.0", None),
        (WARNING.format(end="0.3"), "0.2.5", None),
        (WARNING.format(end="2.0"), "1.4.0", None),
        (WARNING.format(end="0.3"), "0.3.0", "its end has come with 0.3.0"),
        (WARNING.format(end="0.4"), "0.2.0", "longer than one minor version"),
        (WARNING.replace("removed", "gone"), "0.2.0", "say what to use instead and 'removed in rft-x 0.3'"),
        (WARNING.format(end="0.3").replace(", stacklevel=2", ""), "0.2.0", "give stacklevel"),
        ('warnings.warn("slow", UserWarning)', "0.2.0", None),
    ],
)
def test_planted_deprecation(tmp_path, statement, version, complaint):
    rows = deprecation_violations(planted(tmp_path, statement, version))
    assert (rows == []) if complaint is None else (complaint in rows[0] and len(rows) == 1), rows


def test_a_deprecated_name_works_and_warns_once_for_each_line_that_uses_it(tmp_path):
    package = planted(tmp_path, WARNING.format(end="0.3"), "0.2.0")
    script = tmp_path / "user.py"
    script.write_text("from rft_x.old import old_plan\nfor _ in range(5):\n    assert old_plan() == 3\nold_plan()\n")
    done = subprocess.run(
        [sys.executable, "-W", "default::DeprecationWarning", str(script)],
        env={"PYTHONPATH": str(package.folder / "src")}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = [
        line.split(": ")[0].rpartition("/")[2] for line in done.stderr.splitlines() if "DeprecationWarning" in line
    ]
    assert lines == ["user.py:3", "user.py:4"]
