"""Building wheels of the workspace and reading what is in them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import Metadata

from contracts.workspace import ROOT, Package
from release.commands import run

LARGEST_WHEEL_BYTES = 1_000_000


def uv(*arguments: str, root: Path = ROOT, timeout_seconds: float = 300) -> str:
    """Run uv at the root of a repository and return its output.

    Raises:
        CommandError: uv failed; the message holds its output.
    """
    return run(os.environ.get("UV") or shutil.which("uv") or "uv", *arguments, cwd=root, timeout=timeout_seconds)


def build_wheel(package: Package, folder: Path) -> Path:
    """The wheel of `package` alone, with the workspace's source table ignored as an index would."""
    uv("build", "--wheel", "--no-sources", "--out-dir", str(folder), str(package.folder))
    (wheel,) = folder.glob(f"{package.import_name}-*.whl")
    return wheel


def build_both(package: Package, folder: Path) -> tuple[Path, Path]:
    """The source distribution of `package`, and the wheel that it builds by itself, as they are uploaded."""
    uv("build", "--no-sources", "--out-dir", str(folder), str(package.folder))
    (wheel,) = folder.glob(f"{package.import_name}-*.whl")
    (source,) = folder.glob(f"{package.import_name}-*.tar.gz")
    return source, wheel


def contents(wheel: Path) -> set[str]:
    """Names of the files in a wheel, folders apart."""
    with ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def expected_contents(package: Package) -> set[str]:
    """The package's own files and four files of metadata, nothing else."""
    version = package.pyproject["project"]["version"]
    information = f"{package.import_name}-{version}.dist-info"
    own = {
        f"{package.import_name}/{path.relative_to(package.source).as_posix()}"
        for path in package.source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return own | {f"{information}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}


def metadata(wheel: Path) -> Metadata:
    """The validated core metadata of a wheel."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name), validate=True)
