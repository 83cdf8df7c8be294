"""Each package carries the files and the metadata of a distribution of its own."""

from __future__ import annotations

import pytest

from contracts.package_files import (
    MARKER,
    file_violations,
    fragment_violations,
    licence_of_the_repository,
    metadata_violations,
)
from contracts.readme_order import ORDER, order_violations
from contracts.workspace import Package, packages

PACKAGES = packages()
by_name = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


@by_name
def test_files_fragments_and_metadata(package):
    rows = file_violations(package) + fragment_violations(package) + metadata_violations(package)
    assert not rows, "\n".join(rows)


@by_name
def test_the_readme_answers_in_order(package):
    assert order_violations(package.folder / "README.md") == []


@pytest.mark.parametrize(
    ("headings", "complaint"),
    [
        (ORDER, None),
        (ORDER[:-1], "no heading '## Versions'"),
        ((ORDER[1], ORDER[0], *ORDER[2:]), "the order of the headings"),
    ],
)
def test_planted_readme(tmp_path, headings, complaint):
    path = tmp_path / "README.md"
    path.write_text("\n\n".join(["# rft-x", "What it is for.", *headings]))
    rows = order_violations(path)
    assert (rows == []) if complaint is None else complaint in rows[0]
    path.write_text("\n".join(["# rft-x", *ORDER]))
    assert "what the package is for" in order_violations(path)[0]


@by_name
def test_licence_is_that_of_the_repository(package):
    assert (package.folder / "LICENSE").read_text(encoding="utf-8") == licence_of_the_repository()


PYPROJECT = """
[project]
name = "rft-x"
version = "0.1.0"
readme = "README.md"
license = "Apache-2.0"
license-files = ["LICENSE"]

[tool.towncrier]
package = "rft_x"
type = [{directory = "added"}, {directory = "changed"}, {directory = "fixed"}, {directory = "removed"}]
"""


@pytest.fixture
def planted(tmp_path):
    folder = tmp_path / "rft-x"
    source = folder / "src" / "rft_x"
    source.mkdir(parents=True)
    (folder / "changelog.d").mkdir()
    for path, text in {
        source / "py.typed": "",
        source / "errors.py": "",
        folder / "README.md": "# rft-x",
        folder / "LICENSE": "Apache",
        folder / "CHANGELOG.md": f"# Changelog\n\n{MARKER}\n",
        folder / "changelog.d" / "first.added.md": "First.",
        folder / "pyproject.toml": PYPROJECT,
    }.items():
        path.write_text(text)
    return Package(name="rft-x", folder=folder)


def test_complete_package_passes(planted):
    assert file_violations(planted) + fragment_violations(planted) + metadata_violations(planted) == []


@pytest.mark.parametrize("name", ["src/rft_x/py.typed", "src/rft_x/errors.py", "README.md", "LICENSE", "CHANGELOG.md"])
def test_missing_file_is_a_violation(planted, name):
    (planted.folder / name).unlink()
    (row,) = file_violations(planted)
    assert name in row


def test_changelog_without_marker_is_a_violation(planted):
    (planted.folder / "CHANGELOG.md").write_text("# Changelog\n")
    (row,) = file_violations(planted)
    assert MARKER in row


@pytest.mark.parametrize(("name", "text"), [("x.feature.md", "New."), ("x.md", "New."), ("x.fixed.md", " \n")])
def test_bad_fragment_is_a_violation(planted, name, text):
    (planted.folder / "changelog.d" / name).write_text(text)
    assert len(fragment_violations(planted)) == 1


def test_no_fragment_is_a_violation_until_a_release_stands_in_the_changelog(planted):
    (planted.folder / "changelog.d" / "first.added.md").unlink()
    assert len(fragment_violations(planted)) == 1
    (planted.folder / "CHANGELOG.md").write_text(f"# Changelog\n{MARKER}\n## 0.1.0\n")
    assert fragment_violations(planted) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('version = "0.1.0"', 'dynamic = ["version"]', "dynamic is ['version']"),
        ('version = "0.1.0"', 'version = "0.1"', "three numbers"),
        ('name = "rft-x"', 'name = "rft_x"', "name is 'rft_x'"),
        ('license = "Apache-2.0"', 'license = "MIT"', "license is 'MIT'"),
        ('package = "rft_x"', 'package = "rft_y"', "towncrier.package is 'rft_y'"),
        ('{directory = "fixed"}, ', "", "towncrier.type is"),
    ],
)
def test_bad_metadata_is_a_violation(planted, old, new, complaint):
    assert old in PYPROJECT
    (planted.folder / "pyproject.toml").write_text(PYPROJECT.replace(old, new, 1))
    assert any(complaint in row for row in metadata_violations(planted))
