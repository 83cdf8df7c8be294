"""Importing a package is light: no engine, no GPU, nothing beyond its mandatory requirements."""

from __future__ import annotations

from functools import cache

import pytest

from contracts.import_weight import HEAVY, loaded_by, requirement_closure, unexpected_modules
from contracts.workspace import packages

PACKAGES = packages()
WITHOUT_TORCH = frozenset({"rft-rewards"})


@cache
def _baseline(*, with_torch):
    # What an empty interpreter of this environment loads, and torch itself where the package requires torch.
    return loaded_by("import numpy, torch, torch.distributed" if with_torch else "import numpy")


@cache
def _loaded(import_name):
    return loaded_by(f"from {import_name} import *")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_import_loads_no_engine_and_no_optional_library(package):
    heavy = HEAVY | {"torch"} if package.name in WITHOUT_TORCH else HEAVY
    assert _loaded(package.import_name) & heavy == set()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_import_loads_only_what_the_requirements_provide(package):
    rows = unexpected_modules(
        _loaded(package.import_name),
        own=package.import_name,
        baseline=_baseline(with_torch=package.name not in WITHOUT_TORCH),
        distributions=requirement_closure(package.name),
    )
    assert rows == [], f"{package.name} loads {rows}, which its requirements without extras do not provide"


def test_star_import_would_fail_on_a_missing_name_and_on_a_warning():
    with pytest.raises(AssertionError, match="no_such_package"):
        loaded_by("import no_such_package")
    with pytest.raises(AssertionError, match="planted"):
        loaded_by("import warnings; warnings.warn('planted')")


def test_planted_heavy_import_is_seen():
    assert "peft" not in loaded_by("import json")
    assert loaded_by("import httpx") & HEAVY == {"httpx"}


def test_planted_unexpected_module_is_seen():
    closure = requirement_closure("rft-rewards")
    assert unexpected_modules({"json", "rft_rewards"}, own="rft_rewards", baseline=(), distributions=closure) == []
    rows = unexpected_modules({"hypothesis", "rft_dist", "json"}, own="rft_rewards", baseline=(), distributions=closure)
    assert rows == ["hypothesis", "rft_dist"]


def test_closure_follows_mandatory_requirements_only():
    closure = requirement_closure("rft-engines")
    assert {"rft-engines", "rft-dist", "torch", "transformers"} <= closure
    assert closure & {"vllm", "sglang", "rft-sync", "deepspeed"} == set()
