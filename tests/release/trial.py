"""A package where nothing but its wheel and its requirements is installed: its own unit tests run there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from contracts.workspace import Package, read_toml
from release.commands import run
from release.wheels import metadata, uv

TOOLS = ("pytest", "pytest-timeout", "hypothesis", "numpy")


def extras_of(root: Path, name: str) -> list[str]:
    """The extras of a package that the workspace's own environment holds; the others need a GPU or an engine."""
    rows = map(Requirement, read_toml(root / "pyproject.toml")["dependency-groups"]["dev"])
    return sorted(extra for row in rows if row.name == name for extra in row.extras)


def tools_of(root: Path) -> list[str]:
    """What the tests are run with, from the versions in the lock upwards."""
    rows = read_toml(root / "uv.lock")["package"]
    locked = {tool: [Version(row["version"]) for row in rows if row["name"] == tool] for tool in TOOLS}
    return [f"{tool}>={min(versions)}" for tool, versions in locked.items()]


def environment(
    folder: Path,
    wheel: Path,
    siblings: Sequence[Path],
    *,
    extras: Iterable[str] = (),
    pinned: Sequence[str] = (),
    constraints: Path | None = None,
    lowest: bool = False,
    python: str = "3.11",
) -> str:
    """Make an environment with a wheel, its siblings and its requirements from the index; returns its interpreter.

    Args:
        folder: where it is made; outside of every checkout.
        wheel: the package that is tried.
        siblings: wheels of its siblings; siblings come from nowhere else.
        extras: extras of the package to install too.
        pinned: further requirements, such as `pytest==9.0.0`.
        constraints: a file of versions to choose, such as the lock's.
        lowest: take the lowest versions that the package's own ranges allow.
        python: version of the interpreter.
    """  # fmt: skip
    uv("venv", "--quiet", "--python", python, str(folder))
    wanted = sorted(extras)
    own = metadata(wheel)
    names = {metadata(sibling).name for sibling in siblings}
    rows = [f"{own.name}{_bracketed(wanted)} @ {wheel.as_uri()}", *pinned]
    rows += [f"{metadata(sibling).name} @ {sibling.as_uri()}" for sibling in siblings]
    if lowest:  # only what is asked for directly is taken at its lowest
        contexts = [{"extra": extra} for extra in ["", *wanted]]
        rows += [
            f"{row.name}{_bracketed(row.extras)}{row.specifier}"
            for row in own.requires_dist or []
            if row.name not in names and (row.marker is None or any(map(row.marker.evaluate, contexts)))
        ]
    requirements = folder / "requirements.in"
    requirements.write_text("\n".join(rows) + "\n", encoding="utf-8")
    options = ["--resolution", "lowest-direct"] if lowest else []
    options += ["--constraint", str(constraints)] if constraints is not None else []
    interpreter = folder / "bin" / "python"
    command = ("pip", "install", "--quiet", "--python", str(interpreter), "-r", str(requirements), *options)
    uv(*command, root=folder, timeout_seconds=3000)  # not in the checkout, whose settings of uv hold one torch
    return str(interpreter)


def _bracketed(extras: Iterable[str]) -> str:
    return f"[{','.join(sorted(extras))}]" if extras else ""


def lock_as_constraints(root: Path, target: Path) -> Path:
    """The versions of the workspace's own environment as a file of constraints."""
    quiet = ("--quiet", "--locked", "--no-hashes", "--no-emit-workspace", "--no-annotate", "--no-header")
    uv("export", *quiet, "--output-file", str(target), root=root)
    return target


def unit_tests(interpreter: str, root: Path, package: Package) -> str:
    """Run the package's default tests of the checkout at `root` against what is installed; returns the last line.

    Raises:
        CommandError: a test failed, or the package does not come from the environment.
    """
    where = run(interpreter, "-c", f"import {package.import_name} as found; print(found.__file__)", cwd=root).strip()
    if not Path(where).is_relative_to(Path(interpreter).parents[1]):
        raise RuntimeError(f"{package.import_name} was imported from {where}, not from the environment that is tried")
    tests = package.folder.relative_to(root) / "tests"
    options = ("-q", "-p", "no:cacheprovider")
    output = run(interpreter, "-m", "pytest", *options, tests, cwd=root, timeout=3600, OMP_NUM_THREADS="1")
    return output.rstrip().splitlines()[-1]


def tried(root: Path, package: Package, wheel: Path, siblings: Sequence[Path], folder: Path, *, lowest: bool) -> str:
    """The unit tests on the wheel, with the locked versions or with the lowest; returns what pytest says last."""
    interpreter = environment(
        folder / ("lowest" if lowest else "locked"),
        wheel,
        siblings,
        extras=extras_of(root, package.name),
        pinned=tools_of(root),
        constraints=None if lowest else lock_as_constraints(root, folder / "locked.txt"),
        lowest=lowest,
    )
    return unit_tests(interpreter, root, package)
