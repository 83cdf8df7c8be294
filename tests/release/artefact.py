"""What a release uploads, checked: a wheel and a source distribution, and the siblings as they were released last."""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contracts.arrows import ALLOWANCES
from contracts.workspace import Package
from release.commands import git, run
from release.preparation import ReleaseError, package_of, released_versions, tag_of
from release.ranges import open_ranges, refused_siblings, requirements_of
from release.wheels import LARGEST_WHEEL_BYTES, build_both, build_wheel, contents, expected_contents, metadata


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """The two files of one release."""

    package: Package
    source: Path
    wheel: Path


def built(package: Package, folder: Path) -> Artefact:
    """Build the package as it is uploaded, without the workspace's sources, and check it."""
    source, wheel = build_both(package, folder)
    artefact = Artefact(package=package, source=source, wheel=wheel)
    if rows := list(complaints(artefact)):
        raise ReleaseError("\n".join(rows))
    run(sys.executable, "-m", "twine", "check", "--strict", source, wheel, cwd=folder)
    return artefact


def complaints(artefact: Artefact) -> Iterator[str]:
    """What is wrong with the files' contents and metadata."""
    package, wheel = artefact.package, artefact.wheel
    found, expected = contents(wheel), expected_contents(package)
    yield from (f"{wheel.name} holds {name}, which does not belong there" for name in sorted(found - expected))
    yield from (f"{wheel.name} lacks {name}" for name in sorted(expected - found))
    if wheel.stat().st_size >= LARGEST_WHEEL_BYTES:
        yield f"{wheel.name} has {wheel.stat().st_size} bytes, at most {LARGEST_WHEEL_BYTES} are meant"
    project, written = package.pyproject["project"], metadata(wheel)
    if (written.name, str(written.version)) != (package.name, project["version"]):
        yield f"{wheel.name} calls itself {written.name} {written.version}"
    required = {(row.name, str(row.specifier), row.url) for row in written.requires_dist or []}
    wanted = {(row.name, str(row.specifier), None) for row in requirements_of(project)}
    yield from (
        f"{wheel.name} requires {row}, the project table does not" for row in sorted(map(str, required - wanted))
    )
    yield from (f"{wheel.name} does not require {row}" for row in sorted(map(str, wanted - required)))
    yield from open_ranges(project, siblings_of(package.import_name))


def siblings_of(import_name: str) -> list[str]:
    """Distribution names of the siblings that a package needs, those of its siblings included."""
    own = ALLOWANCES[import_name].siblings
    found = own.union(*(ALLOWANCES[sibling].siblings for sibling in own))
    return sorted(name.replace("_", "-") for name in found)


def released_wheel(root: Path, name: str, folder: Path, version: str | None = None) -> Path:
    """The wheel of a package as it was at its latest tag, or at that of `version`; before the first tag, as it is.

    Every release is built from its tag, so it has the bytes that were uploaded.
    """
    released = [str(row) for row in released_versions(root, name)]
    if version is None and not released:
        return build_wheel(package_of(root, name), folder / name)
    tag = tag_of(name, version or released[-1])
    exported = folder / tag
    exported.mkdir(parents=True)
    git(root, "archive", "--output", str(exported / "tree.tar"), tag, f"packages/{name}")
    with tarfile.open(exported / "tree.tar") as tar:
        tar.extractall(exported, filter="data")
    return build_wheel(Package(name=name, folder=exported / "packages" / name), folder / f"{tag}-wheel")


def sibling_wheels(root: Path, package: Package, folder: Path) -> list[Path]:
    """The siblings' wheels that a user of the package would get: the newest released versions in its ranges.

    Raises:
        ReleaseError: no released version is in the range, or these siblings refuse each other.
    """
    wheels = []
    for name in siblings_of(package.import_name):
        released = [str(version) for version in released_versions(root, name)]
        ranges = [row.specifier for row in requirements_of(package.pyproject["project"]) if row.name == name]
        admitted = [version for version in released if all(row.contains(version) for row in ranges)]
        if released and not admitted:
            shown = ", ".join(released)
            raise ReleaseError(f"{package.name} requires {name}{ranges[0]}; released is {shown}: release {name} first")
        wheels.append(released_wheel(root, name, folder, admitted[-1] if admitted else None))
    if rows := conflicts(wheels):
        raise ReleaseError(
            "\n".join([f"{package.name} needs siblings that refuse each other; release them first", *rows])
        )
    return wheels


def conflicts(wheels: Sequence[Path]) -> list[str]:
    """Requirements of the wheels on one another that do not admit the version that is there."""
    read = [metadata(wheel) for wheel in wheels]
    versions = {row.name: str(row.version) for row in read}
    projects = ({"name": row.name, "dependencies": [str(need) for need in row.requires_dist or []]} for row in read)
    rows = (row for project in projects for row in refused_siblings(project, versions))
    return [row.replace("the tree holds", "there is") for row in rows]
