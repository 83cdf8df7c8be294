"""A scratch copy of the repository in which releases are rehearsed, and an index made of its wheels."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile

from packaging.utils import canonicalize_name

from contracts.workspace import ROOT, committed_files, packages
from release.artefact import released_wheel
from release.commands import CommandError, git
from release.preparation import prepare, released_versions
from release.release_one import Plan, release
from release.wheels import metadata, uv

DATE = "2030-01-31"


def first_releases(folder: Path) -> Path:
    """A copy of the tree as it is now in a repository of its own, where every package was released once."""
    for path in committed_files():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "config", "user.name", "Rehearsal")
    git(folder, "config", "user.email", "rehearsal@example.org")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "All of it")
    for package in packages(folder):
        prepare(folder, package.name, package.pyproject["project"]["version"], date=DATE)
    return folder


class Rehearsal:
    """A copy of such a repository, in which more is released."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self.root = shutil.copytree(repository, folder / "repository")
        self._out = folder / "out"
        self._wheels = folder / "wheels"

    def commit(self, message: str) -> None:
        """Commit every change."""
        git(self.root, "add", "--all")
        git(self.root, "commit", "--quiet", "--message", message)

    def change(self, package: str, fragment: str, text: str = "Something for users.") -> None:
        """Commit a changelog fragment, such as `plan.added`."""
        folder = self.root / "packages" / package / "changelog.d"
        folder.mkdir(exist_ok=True)  # git keeps no empty folder, and a release empties it
        (folder / f"{fragment}.md").write_text(f"{text}\n", encoding="utf-8")
        self.commit(f"{package}: {fragment}")

    def release(self, package: str, version: str, *, move_ranges: bool = False, write: bool = True) -> Path:
        """Release a package without the trials in environments of their own; returns the wheel."""
        out = self._out / f"{package}-{version}"
        plan = Plan(
            root=self.root, package=package, version=version, out=out, date=DATE, trials=False, write=write,
            move_ranges=move_ranges,
        )  # fmt: skip
        return release(plan).wheel

    def version(self, package: str) -> str:
        """The version in the tree."""
        (found,) = (row for row in packages(self.root) if row.name == package)
        return found.pyproject["project"]["version"]

    def tags(self) -> list[str]:
        """All tags, sorted."""
        return sorted(git(self.root, "tag").split())

    def index(self) -> Path:
        """A folder with the wheel of every release, and stand-ins for the libraries that they require."""
        folder = self._wheels / "index"
        folder.mkdir(parents=True, exist_ok=True)
        for package in packages(self.root):
            for version in released_versions(self.root, package.name):
                known = list(folder.glob(f"{package.import_name}-{version}-*.whl"))
                if not known:
                    made = self._wheels / f"{package.name}-{version}"
                    shutil.copy(released_wheel(self.root, package.name, made, str(version)), folder)
        _stand_ins(folder)
        return folder


def resolved(index: Path, *wanted: str) -> dict[str, str]:
    """What uv would install of an index for these requirements: name -> version, of the packages of this repository.

    Raises:
        CommandError: there is no solution.
    """
    asked = index / "requirements.in"
    asked.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    offline = ("--quiet", "--no-index", "--offline", "--find-links", str(index), "--no-header", "--no-annotate")
    lines = uv("pip", "compile", *offline, "--python-version", "3.11", str(asked), root=index).split()
    return dict(line.split("==") for line in lines if line.startswith("rft-"))


def refused(index: Path, *wanted: str) -> str:
    """uv's reason why there is no solution; an empty text where there is one."""
    try:
        resolved(index, *wanted)
    except CommandError as error:
        return " ".join(str(error).split())
    return ""


def _stand_ins(folder: Path) -> None:
    """A wheel without content for each library that a wheel in the folder requires, in a version its range admits."""
    for wheel in list(folder.glob("rft_*.whl")):
        for row in metadata(wheel).requires_dist or []:
            if canonicalize_name(row.name).startswith("rft-"):
                continue
            lowest = next((bound.version for bound in row.specifier if bound.operator in (">=", "==")), "1")
            _write_wheel(folder, canonicalize_name(row.name), lowest, row.extras)


def _write_wheel(folder: Path, name: str, version: str, extras: Iterable[str]) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    offered = "".join(f"Provides-Extra: {extra}\n" for extra in extras)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{offered}",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: rehearsal\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(f"{stem}.dist-info/{file}", text)
