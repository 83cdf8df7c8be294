"""The range of every sibling requirement admits the version in the tree."""

from __future__ import annotations

import pytest

from contracts.workspace import ROOT, app_folders, packages, read_toml
from release.ranges import open_ranges, refused_siblings

PACKAGES = packages()
VERSIONS = {package.name: package.pyproject["project"]["version"] for package in PACKAGES}
FOLDERS = [package.folder for package in PACKAGES] + app_folders()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_ranges_admit_the_tree(folder):
    rows = refused_siblings(read_toml(folder / "pyproject.toml")["project"], VERSIONS)
    assert not rows, "\n".join(rows)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_published_ranges_have_both_bounds(package):
    rows = open_ranges(package.pyproject["project"], VERSIONS)
    assert not rows, "\n".join(rows)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_breaking_version_of_a_sibling_is_refused(package):
    broken = {name: "0.2.0" if name != package.name else version for name, version in VERSIONS.items()}
    required = {row for row in VERSIONS if any(row in text for text in package.pyproject["project"]["dependencies"])}
    rows = refused_siblings(package.pyproject["project"], broken)
    assert all(any(f"holds {name} 0.2.0" in row for row in rows) for name in required)
    assert bool(rows) == bool(required)


PROJECT = {
    "name": "rft-x",
    "dependencies": ["torch>=2.11", "rft-dist>=0.1,<0.2"],
    "optional-dependencies": {"deepspeed": ["rft-sync[deepspeed]>=0.1"]},
}


@pytest.mark.parametrize(("version", "count"), [("0.1.0", 0), ("0.1.9", 0), ("0.2.0", 1), ("0.0.9", 1)])
def test_planted_version(version, count):
    assert len(refused_siblings(PROJECT, {"rft-dist": version})) == count


def test_planted_open_range_of_an_extra():
    (row,) = open_ranges(PROJECT, ["rft-dist", "rft-sync"])
    assert row.startswith("rft-x requires rft-sync[deepspeed]>=0.1;")
