"""What importing a package loads, against what its mandatory requirements provide."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HEAVY = frozenset(
    {
        "accelerate",
        "datasets",
        "deepspeed",
        "gguf",
        "httpx",
        "math_verify",
        "peft",
        "sglang",
        "tensorboard",
        "transformers",
        "vllm",
        "wandb",
    }
)

_REPORT = """
import json, sys
{statement}
names = {{name.partition(".")[0] for name, module in sys.modules.items() if module is not None}}
print("LOADED" + json.dumps(sorted(names)))
"""


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in `sys.modules` of a fresh process, without GPU, after `statement`."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _REPORT.format(statement=statement)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{statement!r} failed:\n{done.stderr}"
    return set(json.loads(done.stdout.rpartition("LOADED")[2]))


@cache
def _providers() -> Mapping[str, list[str]]:
    # Reads the file list of every installed distribution, which takes seconds.
    return packages_distributions()


def requirement_closure(distribution: str) -> set[str]:
    """The canonical names of `distribution` and all it requires without extras in this environment."""
    closure: set[str] = set()
    waiting = [distribution]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in closure:
            continue
        closure.add(name)
        try:
            rows = requires(name) or []
        except PackageNotFoundError:
            continue  # a requirement whose marker holds elsewhere only
        requirements = [Requirement(row) for row in rows]
        waiting += [row.name for row in requirements if row.marker is None or row.marker.evaluate({"extra": ""})]
    return closure


def unexpected_modules(
    loaded: Iterable[str], *, own: str, baseline: Iterable[str], distributions: set[str]
) -> list[str]:
    """Top-level modules that are neither standard library, `own`, in `baseline` nor from `distributions`."""
    providers = _providers()
    allowed = {own, *baseline, *sys.stdlib_module_names}
    provided = {name.replace("-", "_") for name in distributions if name.startswith("rft-")}
    return sorted(
        name
        for name in set(loaded) - allowed - provided
        if not {canonicalize_name(provider) for provider in providers.get(name, ())} & distributions
    )
