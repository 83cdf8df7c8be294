"""The wheels of the tree, built once."""

from __future__ import annotations

import pytest

from contracts.workspace import packages
from release.wheels import build_wheel


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """Package name -> its wheel."""
    return {package.name: build_wheel(package, tmp_path_factory.mktemp(package.name)) for package in packages()}
