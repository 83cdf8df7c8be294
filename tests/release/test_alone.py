"""Each package works where nothing but its wheel and its locked requirements is installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from contracts.arrows import ALLOWANCES, FIVE
from contracts.documents import blocks_of, run_block
from contracts.import_weight import HEAVY
from contracts.workspace import packages
from release.wheels import uv

PACKAGES = {package.name: package for package in packages()}

_REPORT = """
import importlib.util, json, sys
import {package}
from {package} import *
print(json.dumps({{
    "file": {package}.__file__,
    "loaded": sorted({{name.partition(".")[0] for name in sys.modules}}),
    "present": [name for name in {names!r} if importlib.util.find_spec(name)],
}}))
"""


def _environment(package, wheels, folder):
    """An environment outside the checkout with the wheels of `package` and its siblings, offline, locked versions."""
    uv("venv", "--quiet", "--python", f"{sys.version_info.major}.{sys.version_info.minor}", str(folder))
    requirements = folder / "requirements.txt"
    uv(
        *("export", "--quiet", "--locked", "--offline", "--package", package.name, "--no-dev"),
        *("--no-emit-workspace", "--no-hashes", "--output-file", str(requirements)),
    )
    siblings = {name.replace("_", "-") for name in _closure(package.import_name)}
    own = [str(wheels[name]) for name in sorted(siblings)]
    python = folder / "bin" / "python"
    uv("pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(python), "-r", str(requirements), *own)
    return str(python)


def _closure(import_name):
    siblings = ALLOWANCES[import_name].siblings
    return {import_name}.union(siblings, *(_closure(sibling) for sibling in siblings))


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_package_installed_alone_imports_and_runs_its_readme(name, wheels, tmp_path):
    package = PACKAGES[name]
    python = _environment(package, wheels, tmp_path / "environment")
    script = _REPORT.format(package=package.import_name, names=sorted(FIVE))
    # torch itself warns where numpy, which it does not require, is missing.
    warnings = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]
    done = subprocess.run(
        [python, *warnings, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["file"].startswith(str(tmp_path))
    assert set(report["present"]) == _closure(package.import_name)
    assert set(report["loaded"]) & FIVE <= _closure(package.import_name)
    assert set(report["loaded"]) & HEAVY == set()
    for block in blocks_of(package.folder / "README.md"):
        if block.language == "python" and not block.needs:
            folder = tmp_path / f"line{block.line}"
            folder.mkdir()
            run_block(block, folder, python=python)
