"""Where the packages, apps, sources and pages of this repository are."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GENERATED_FOLDERS = frozenset({"__pycache__", "build", "dist", "node_modules", "runs"})


@dataclass(frozen=True, kw_only=True)
class Package:
    """One published distribution of the workspace."""

    name: str
    folder: Path

    @property
    def import_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.import_name

    @property
    def modules(self) -> list[Path]:
        return sorted(self.source.rglob("*.py"))

    @property
    def pyproject(self) -> dict[str, Any]:
        return read_toml(self.folder / "pyproject.toml")


def read_toml(path: Path) -> dict[str, Any]:
    """The parsed content of a TOML file."""
    with path.open("rb") as stream:
        return tomllib.load(stream)


def packages(root: Path = ROOT) -> list[Package]:
    """The folders of `packages/` that hold a pyproject.toml, by name."""
    files = sorted((root / "packages").glob("*/pyproject.toml"))
    return [Package(name=file.parent.name, folder=file.parent) for file in files]


def app_folders(root: Path = ROOT) -> list[Path]:
    """The folders of `apps/` that hold a pyproject.toml, by name."""
    return sorted(file.parent for file in (root / "apps").glob("*/pyproject.toml"))


def files_below(root: Path, pattern: str = "*") -> Iterator[Path]:
    """Files under `root` that match `pattern`, without hidden folders, environments and build outputs.

    `.ci` and `.github` are the two hidden folders that belong to the repository.
    """
    for path in sorted(root.rglob(pattern)):
        folders = path.relative_to(root).parts[:-1]
        hidden = any(part.startswith(".") and part not in {".ci", ".github"} for part in folders)
        generated = any(part in GENERATED_FOLDERS or part.endswith(".egg-info") for part in folders)
        if path.is_file() and not hidden and not generated:
            yield path


def committed_files(root: Path = ROOT) -> list[Path]:
    """The files under version control; in an unpacked archive, which has no version control, all files."""
    if not (root / ".git").exists():
        return list(files_below(root))
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, timeout=60, check=True)
    return [path for name in done.stdout.split("\0") if name and (path := root / name).is_file()]


def shown(path: Path, root: Path = ROOT) -> str:
    """`path` relative to `root`, as messages name it."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
