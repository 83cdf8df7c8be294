"""Configurations are frozen, keyword-only dataclasses."""

from __future__ import annotations

import pytest

from contracts.configs import config_violations
from contracts.workspace import packages


def test_configurations_are_frozen_and_keyword_only():
    rows = [row for package in packages() for path in package.modules for row in config_violations(path)]
    assert not rows, "\n".join(rows)


@pytest.mark.parametrize(
    ("decorator", "missing"),
    [
        ("@dataclass", ["frozen", "kw_only"]),
        ("@dataclasses.dataclass(frozen=True)", ["kw_only"]),
        ("@dataclass(frozen=False, kw_only=True)", ["frozen"]),
        ("@dataclass(frozen=True, kw_only=True, slots=True)", []),
        ("@final", []),
    ],
)
@pytest.mark.parametrize("name", ["EngineConfig", "SamplingParams"])
def test_planted_configuration(tmp_path, decorator, missing, name):
    path = tmp_path / "planned.py"
    path.write_text(f"{decorator}\nclass {name}:\n    x: int\n")
    assert config_violations(path) == [f"{path}:2: {name} lacks {word}=True" for word in missing]


def test_other_dataclasses_are_free(tmp_path):
    path = tmp_path / "planned.py"
    path.write_text("@dataclass\nclass Bucket:\n    x: int\n")
    assert config_violations(path) == []
