"""Each package builds by itself into a small, typed, licensed, reproducible wheel with the right metadata."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from contracts.workspace import packages
from release.ranges import requirements_of
from release.wheels import (
    LARGEST_WHEEL_BYTES,
    build_both,
    build_wheel,
    contents,
    expected_contents,
    metadata,
)

by_name = pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)


@by_name
def test_wheel_holds_the_package_its_types_and_its_licence(package, wheels):
    found = contents(wheels[package.name])
    assert found == expected_contents(package)
    assert f"{package.import_name}/py.typed" in found
    assert not [name for name in found if "tests/" in name]
    assert wheels[package.name].stat().st_size < LARGEST_WHEEL_BYTES


@by_name
def test_metadata_is_that_of_the_project_table(package, wheels):
    project = package.pyproject["project"]
    found = metadata(wheels[package.name])
    assert (found.name, str(found.version)) == (package.name, project["version"])
    assert found.summary == project["description"]
    assert str(found.requires_python) == str(Requirement(f"x{project['requires-python']}").specifier)
    assert (found.license_expression, found.license_files) == ("Apache-2.0", ["LICENSE"])
    assert found.description_content_type == "text/markdown"
    assert found.description == (package.folder / "README.md").read_text(encoding="utf-8")
    assert sorted(found.provides_extra or []) == sorted(project.get("optional-dependencies", {}))


@by_name
def test_wheel_requires_the_ranges_of_the_project_table_and_no_path(package, wheels):
    required = metadata(wheels[package.name]).requires_dist or []
    found = {(row.name, tuple(sorted(row.extras)), str(row.specifier), row.url) for row in required}
    wanted = {
        (row.name, tuple(sorted(row.extras)), str(row.specifier), None)
        for row in requirements_of(package.pyproject["project"])
    }
    assert found == wanted
    assert len(required) == len(requirements_of(package.pyproject["project"]))


@by_name
def test_two_builds_and_a_build_from_the_source_distribution_are_equal(package, wheels, tmp_path):
    first = wheels[package.name].read_bytes()
    assert build_wheel(package, tmp_path / "again").read_bytes() == first
    _, from_source = build_both(package, tmp_path / "both")
    assert from_source.read_bytes() == first


def test_a_planted_file_shows_in_the_comparison(tmp_path):
    (package, *_) = packages()
    wheel = build_wheel(package, tmp_path)
    from zipfile import ZipFile

    with ZipFile(wheel, "a") as archive:
        archive.writestr("tests/test_planted.py", "")
    assert contents(wheel) - expected_contents(package) == {"tests/test_planted.py"}
