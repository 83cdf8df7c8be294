"""Who may import whom, in every scope, and that the checkers see a planted violation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from contracts.arrows import (
    ALLOWANCES,
    APP_SIBLINGS,
    FIVE,
    SERVED_BY_ONE_MODULE,
    Allowance,
    declared_siblings,
    import_violations,
    loaded_with,
    scattered_libraries,
    sibling_violations,
    sites_of,
    undeclared_siblings,
)
from contracts.imports import ImportSite, Scope, import_sites
from contracts.workspace import ROOT, app_folders, files_below, packages, read_toml

PACKAGES = packages()


def test_the_table_covers_exactly_the_packages_and_apps_of_the_tree():
    assert {package.import_name for package in PACKAGES} == set(ALLOWANCES) == FIVE
    assert {folder.name for folder in app_folders()} <= set(APP_SIBLINGS)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_package_imports_stay_within_the_table(package):
    sites = sites_of(package.modules, ROOT)
    rows = import_violations(package.import_name, ALLOWANCES[package.import_name], sites)
    rows += undeclared_siblings(package.import_name, package.pyproject["project"], sites)
    assert not rows, "\n".join(rows)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_package_requires_only_siblings_that_the_arrows_allow(package):
    assert declared_siblings(package.pyproject["project"]) <= ALLOWANCES[package.import_name].siblings


@pytest.mark.parametrize("folder", app_folders(), ids=lambda folder: folder.name)
def test_app_imports_only_the_packages_it_composes(folder):
    sites = sites_of(files_below(folder, "*.py"), ROOT)
    rows = sibling_violations(folder.name, APP_SIBLINGS[folder.name], sites)
    rows += undeclared_siblings(folder.name, read_toml(folder / "pyproject.toml")["project"], sites)
    assert not rows, "\n".join(rows)


def test_each_foreign_library_is_served_by_one_module_of_rft_sync():
    (package,) = (package for package in PACKAGES if package.import_name == "rft_sync")
    rows = scattered_libraries(sites_of(package.modules, ROOT), SERVED_BY_ONE_MODULE)
    assert not rows, "\n".join(rows)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_unit_tests_import_only_what_their_package_may(package):
    files = files_below(package.folder / "tests", "*.py") if (package.folder / "tests").is_dir() else ()
    allowed = ALLOWANCES[package.import_name].siblings | {package.import_name}
    rows = sibling_violations(f"tests of {package.name}", allowed, sites_of(files, ROOT))
    assert not rows, "\n".join(rows)


def test_import_linter_keeps_every_contract():
    done = _lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_linter_refuses_a_planted_sibling_import(tmp_path):
    for package in PACKAGES:
        folder = tmp_path / "src" / package.import_name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    (tmp_path / "src" / "rft_sync" / "manager.py").write_text("def f():\n    import rft_engines\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    done = _lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rft_sync.manager -> rft_engines" in done.stdout


def _lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False, env=environment)


def test_sites_are_found_in_every_scope():
    text = """
import torch
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from vllm import LLM
class Adapter:
    import json
    def load(self):
        from rft_dist.groups import x
        return importlib.import_module("peft.tuners")
try:
    import numpy
except ImportError:
    numpy = None
from . import neighbour
"""
    found = {(site.module, site.scope) for site in import_sites(text)}
    assert found == {
        ("torch", Scope.MODULE),
        ("typing", Scope.MODULE),
        ("vllm", Scope.TYPING),
        ("json", Scope.MODULE),
        ("rft_dist.groups", Scope.FUNCTION),
        ("peft.tuners", Scope.FUNCTION),
        ("numpy", Scope.MODULE),
        (".", Scope.MODULE),
    }


@pytest.mark.parametrize(
    ("module", "scope", "complaint"),
    [
        ("rft_engines.vllm", Scope.FUNCTION, "allowed siblings: none"),
        ("rft_engines", Scope.TYPING, "allowed siblings: none"),
        ("deepspeed", Scope.MODULE, "move it into the function"),
        ("numpy", Scope.FUNCTION, "allowed: torch"),
        (".neighbour", Scope.MODULE, "absolute name"),
    ],
)
def test_planted_import_is_a_violation(module, scope, complaint):
    (row,) = import_violations("rft_sync", ALLOWANCES["rft_sync"], [("a.py", ImportSite(module, 3, scope))])
    assert row.startswith("a.py:3: rft_sync imports")
    assert complaint in row


@pytest.mark.parametrize(
    ("module", "scope"),
    [("torch.distributed", Scope.MODULE), ("deepspeed", Scope.FUNCTION), ("rft_sync.plan", Scope.MODULE)],
)
def test_allowed_import_is_no_violation(module, scope):
    assert import_violations("rft_sync", ALLOWANCES["rft_sync"], [("a.py", ImportSite(module, 1, scope))]) == []


def test_planted_app_import_undeclared_sibling_and_scattered_library_are_violations():
    site = ImportSite("rft_trainer.trainer", 7, Scope.FUNCTION)
    assert sibling_violations("sync_only", APP_SIBLINGS["sync_only"], [("m.py", site)]) == [
        "m.py:7: app sync_only imports rft_trainer.trainer; allowed: rft_sync"
    ]
    project = {"dependencies": ["rft-dist>=0.1,<0.2"], "optional-dependencies": {"x": ["rft-sync[deepspeed]>=0.1"]}}
    assert declared_siblings(project) == {"rft_dist", "rft_sync"}
    assert undeclared_siblings("gsm8k", project, [("m.py", site)]) == [
        "gsm8k imports rft_trainer, but its pyproject.toml does not require rft-trainer"
    ]
    twice = [("a.py", ImportSite("vllm", 1, Scope.FUNCTION)), ("b.py", ImportSite("vllm.config", 1, Scope.FUNCTION))]
    assert scattered_libraries(twice, frozenset({"vllm"})) == [
        "vllm is imported by 2 modules, one may serve it: a.py, b.py"
    ]
    assert scattered_libraries(twice[:1], frozenset({"vllm"})) == []


def test_allowance_is_empty_by_default():
    (row,) = import_violations("rft_new", Allowance(), [("a.py", ImportSite("torch", 1, Scope.MODULE))])
    assert "allowed: none, lazily none" in row


def test_only_a_module_that_the_package_does_not_load_may_import_its_library_at_the_top():
    allowance = Allowance(lazily=frozenset({"vllm"}), adapters=frozenset({"vllm"}))

    def violations(scope):
        sites = [
            ("src/rft_new/__init__.py", ImportSite("rft_new", 1, Scope.MODULE, ("engines",))),
            ("src/rft_new/engines/__init__.py", ImportSite("rft_new.engines.choice", 1, Scope.MODULE, ("choose",))),
            ("src/rft_new/engines/choice.py", ImportSite("rft_new.engines.adapter", 5, scope, ("Engine",))),
            ("src/rft_new/engines/adapter.py", ImportSite("vllm", 1, Scope.MODULE)),
        ]
        return loaded_with("rft_new", sites), import_violations("rft_new", allowance, sites)

    loaded, rows = violations(Scope.FUNCTION)
    assert "rft_new.engines.choice" in loaded
    assert "rft_new.engines.adapter" not in loaded
    assert rows == []
    loaded, rows = violations(Scope.MODULE)
    assert "rft_new.engines.adapter" in loaded
    assert len(rows) == 1


def test_importing_a_module_loads_the_packages_above_it():
    sites = [
        ("src/rft_new/__init__.py", ImportSite("rft_new.deep.leaf", 1, Scope.MODULE)),
        ("src/rft_new/deep/__init__.py", ImportSite("rft_new.other", 1, Scope.MODULE)),
    ]
    assert {"rft_new.deep.leaf", "rft_new.deep", "rft_new.other"} <= loaded_with("rft_new", sites)
