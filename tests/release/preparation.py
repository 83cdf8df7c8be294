"""The commit and the tag of a release: version, changelog, ranges of siblings, frozen interface."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version

from contracts.package_files import fragment_violations
from contracts.workspace import Package, app_folders, packages, read_toml
from release.commands import git, run
from release.public_api import FROZEN, breakages, freeze, interface_of, is_announced, read_frozen
from release.ranges import refused_siblings

_PUBLIC_API = FROZEN.relative_to(FROZEN.parents[2])


class ReleaseError(ValueError):
    """A package cannot be released like this; the message says what to change."""


def package_of(root: Path, name: str) -> Package:
    """The package called `name` in the repository at `root`.

    Raises:
        ReleaseError: there is none.
    """
    known = {package.name: package for package in packages(root)}
    if name not in known:
        raise ReleaseError(f"no package {name!r}: give one of {', '.join(known)}")
    return known[name]


def tag_of(name: str, version: str) -> str:
    """The tag of a release, such as rft-sync-v0.2.0."""
    return f"{name}-v{version}"


def released_versions(root: Path, name: str) -> list[Version]:
    """Versions of the package that carry a tag, rising."""
    tags = git(root, "tag", "--list", tag_of(name, "*")).split()
    return sorted(Version(tag.removeprefix(tag_of(name, ""))) for tag in tags)


def prepare(root: Path, name: str, version: str, *, date: str, move_ranges: bool = False) -> str:
    """Commit and tag the release of one package in the repository at `root`; returns the tag.

    Args:
        root: a clean checkout of the whole repository.
        name: name of the package.
        version: its new version; the first release may keep the version in the tree.
        date: of the entry in the changelog, such as 2030-01-31.
        move_ranges: give every sibling in the tree that refuses the new version a range that admits it, and a
            changelog fragment. Their published versions go on refusing it until they are released themselves.

    Raises:
        ReleaseError: version, fragments or ranges do not fit.
    """
    package = package_of(root, name)
    frozen = root / _PUBLIC_API
    _check_version(root, package, version)
    _check_fragments(
        package, version, breakages(package.import_name, read_frozen(package, frozen), interface_of(package))
    )
    _write_version(root, package, version)
    if move_ranges:
        for folder in _dependants(root):
            _move_range(folder, name, version)
    if rows := list(_refusals(root)):
        raise ReleaseError("\n".join([*rows, "move these ranges with --move-ranges, or choose a version they admit"]))
    _compile_changelog(root, package, version, date)
    freeze(package, frozen)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", f"{name} {version}")
    git(root, "tag", "--annotate", "--message", f"{name} {version}", tag_of(name, version))
    return tag_of(name, version)


def breaking_range(version: str) -> str:
    """The range of a version and what is compatible with it: >=0.2,<0.3 of 0.2.0, >=1.4,<2 of 1.4.2."""
    parsed = Version(version)
    upper = f"0.{parsed.minor + 1}" if parsed.major == 0 else str(parsed.major + 1)
    return f">={parsed.major}.{parsed.minor},<{upper}"


def _check_version(root: Path, package: Package, version: str) -> None:
    released = released_versions(root, package.name)
    current = Version(package.pyproject["project"]["version"])
    new = Version(version)
    if len(new.release) != 3 or str(new) != version or new.is_prerelease:
        raise ReleaseError(f"version {version!r}: give three numbers, such as 0.2.0")
    if new < current or new in released or (released and new <= released[-1]):
        known = f"released: {', '.join(map(str, released))}" if released else "not released yet"
        raise ReleaseError(f"version {version}: {package.name} is at {current} ({known}); give a higher one")


def _check_fragments(package: Package, version: str, broken: list[str]) -> None:
    fragments = [path.name for path in (package.folder / "changelog.d").glob("*.md")]
    if not fragments:
        raise ReleaseError(f"{package.name} has nothing to release: no fragment in its changelog.d")
    if rows := fragment_violations(package):
        raise ReleaseError("\n".join(rows))
    if broken and not is_announced(package):
        raise ReleaseError("\n".join(["no changed or removed fragment tells of these breaks:", *broken]))
    new = Version(version)
    compatible = new.micro > 0 or (new.major > 0 and new.minor > 0)
    if broken and compatible:
        raise ReleaseError("\n".join([f"version {version} promises compatibility, and these are breaks:", *broken]))


def _write_version(root: Path, package: Package, version: str) -> None:
    """Both places that hold the version: the project table and the workspace's lock."""
    current = package.pyproject["project"]["version"]
    manifest, lock = package.folder / "pyproject.toml", root / "uv.lock"
    _replace_once(manifest, f'\nversion = "{current}"\n', f'\nversion = "{version}"\n')
    entry = '[[package]]\nname = "{}"\nversion = "{}"\n'
    _replace_once(lock, entry.format(package.name, current), entry.format(package.name, version))


def _replace_once(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise ReleaseError(f"{path.name} holds {old.strip()!r} {text.count(old)} times, expected once")
    path.write_text(text.replace(old, new), encoding="utf-8")


def _dependants(root: Path) -> list[Path]:
    return [package.folder for package in packages(root)] + app_folders(root)


def _refusals(root: Path) -> Iterator[str]:
    versions = {package.name: package.pyproject["project"]["version"] for package in packages(root)}
    for folder in _dependants(root):
        yield from refused_siblings(read_toml(folder / "pyproject.toml")["project"], versions)


def _move_range(folder: Path, name: str, version: str) -> None:
    """Let the project in `folder` require `version` of `name`, where its range refuses it."""
    manifest = folder / "pyproject.toml"
    project: dict[str, Any] = read_toml(manifest)["project"]
    if not refused_siblings(project, {name: version}):
        return
    admitted = breaking_range(version)
    text = manifest.read_text(encoding="utf-8")
    text = re.sub(rf'"({name}(?:\[[\w,-]+\])?)\s*[<>=!~][^";]*"', rf'"\g<1>{admitted}"', text)
    manifest.write_text(text, encoding="utf-8")
    if (folder / "CHANGELOG.md").is_file():  # apps have none
        fragment = folder / "changelog.d" / f"{name}-{version.replace('.', '-')}.changed.md"
        fragment.parent.mkdir(exist_ok=True)  # git keeps no empty folder, and a release empties it
        fragment.write_text(f"Requires {name} {admitted}.\n", encoding="utf-8")


def _compile_changelog(root: Path, package: Package, version: str, date: str) -> None:
    folder = package.folder.relative_to(root)
    command = ("--config", str(folder / "pyproject.toml"), "--dir", str(folder), "--version", version, "--date", date)
    run(sys.executable, "-m", "towncrier", "build", *command, "--yes", cwd=root)
