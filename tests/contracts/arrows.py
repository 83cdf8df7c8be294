"""The dependency arrows of the repository, as data and as a check."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.imports import ImportSite, Scope, import_sites

FIVE = frozenset({"rft_dist", "rft_engines", "rft_sync", "rft_rewards", "rft_trainer"})


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What the modules of one package or app may import besides the standard library and themselves.

    `anywhere` may stand at module level; `lazily` only inside a function or under TYPE_CHECKING. `adapters` are those
    of `lazily` that may also stand at the top of a module which importing the package does not load.
    """

    siblings: frozenset[str] = frozenset()
    anywhere: frozenset[str] = frozenset()
    lazily: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()


ALLOWANCES: Mapping[str, Allowance] = {
    "rft_dist": Allowance(anywhere=frozenset({"torch"})),
    "rft_sync": Allowance(
        anywhere=frozenset({"torch"}),
        # safetensors comes with vllm and writes the adapter files that it reads; triton comes with torch's CUDA builds.
        lazily=frozenset({"deepspeed", "peft", "vllm", "sglang", "transformers", "safetensors", "triton"}),
        adapters=frozenset({"triton"}),
    ),
    "rft_rewards": Allowance(
        anywhere=frozenset({"numpy"}),
        lazily=frozenset({"torch", "transformers", "httpx", "math_verify", "sympy"}),
        adapters=frozenset({"math_verify", "sympy"}),
    ),
    "rft_engines": Allowance(
        siblings=frozenset({"rft_dist"}),
        anywhere=frozenset({"torch"}),
        # numpy comes with transformers; an engine's changes to its global generator are undone.
        lazily=frozenset({"transformers", "vllm", "sglang", "numpy"}),
        adapters=frozenset({"transformers", "vllm", "sglang"}),
    ),
    "rft_trainer": Allowance(
        siblings=frozenset({"rft_dist", "rft_engines", "rft_sync", "rft_rewards"}),
        anywhere=frozenset({"torch", "rich", "tyro"}),
        lazily=frozenset(
            {
                "PIL",
                "datasets",
                "deepspeed",
                "numpy",
                "peft",
                "tokenizers",
                "huggingface_hub",
                "pyarrow",
                "safetensors",
                "tensorboard",
                "transformers",
                "wandb",
            }
        ),
        adapters=frozenset({"deepspeed", "peft", "safetensors", "transformers"}),
    ),
}

APP_SIBLINGS: Mapping[str, frozenset[str]] = {
    "gsm8k": FIVE,
    "geo3k": FIVE,
    "sync_only": frozenset({"rft_sync"}),
}

SERVED_BY_ONE_MODULE = frozenset({"deepspeed", "peft", "vllm", "sglang", "safetensors"})


def sites_of(files: Iterable[Path], root: Path) -> list[tuple[str, ImportSite]]:
    """(path relative to `root`, import site) of every import in `files`."""
    return [
        (file.relative_to(root).as_posix(), site)
        for file in files
        for site in import_sites(file.read_text(encoding="utf-8"))
    ]


def module_name(path: str) -> str:
    """Dotted name of a module from its path, which may begin with the folders above `src`."""
    return path.rpartition("src/")[2].removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def loaded_with(package: str, sites: Iterable[tuple[str, ImportSite]]) -> set[str]:
    """Modules that `import package` runs: those reachable from its `__init__` by imports at module level."""
    imported: dict[str, set[str]] = {}
    for path, site in sites:
        if site.scope is Scope.MODULE:
            names = {site.module, *(f"{site.module}.{name}" for name in site.names)}
            imported.setdefault(module_name(path), set()).update(names)
    loaded: set[str] = set()
    waiting = {package}
    while waiting:
        name = waiting.pop()
        loaded.add(name)
        parents = {name.rpartition(".")[0]} if "." in name else set()
        waiting |= (imported.get(name, set()) | parents) - loaded
    return loaded


def import_violations(importer: str, allowance: Allowance, sites: Iterable[tuple[str, ImportSite]]) -> list[str]:
    """Imports of `importer` that `allowance` does not contain, one line each."""
    sites = list(sites)
    loaded = loaded_with(importer, sites)
    rows = []
    for path, site in sites:
        if site.top in {importer, *sys.stdlib_module_names}:
            continue
        place = f"{path}:{site.line}: {importer} imports {site.module} {site.scope}"
        if site.module.startswith("."):
            rows.append(f"{place}; write the absolute name")
        elif site.top in FIVE:
            if site.top not in allowance.siblings:
                rows.append(f"{place}; allowed siblings: {_listed(allowance.siblings)}")
        elif site.top in allowance.lazily:
            adapter = site.top in allowance.adapters and module_name(path) not in loaded
            if site.scope is Scope.MODULE and not adapter:
                rows.append(f"{place}; move it into the function that needs it")
        elif site.top not in allowance.anywhere:
            rows.append(f"{place}; allowed: {_listed(allowance.anywhere)}, lazily {_listed(allowance.lazily)}")
    return rows


def sibling_violations(app: str, siblings: frozenset[str], sites: Iterable[tuple[str, ImportSite]]) -> list[str]:
    """Imports of published packages by an app that composes only `siblings`."""
    return [
        f"{path}:{site.line}: app {app} imports {site.module}; allowed: {_listed(siblings)}"
        for path, site in sites
        if site.top in FIVE and site.top not in siblings
    ]


def undeclared_siblings(
    importer: str, project: Mapping[str, Any], sites: Iterable[tuple[str, ImportSite]]
) -> list[str]:
    """Siblings that are imported but stand in no requirement of the importer's own `[project]` table."""
    declared = declared_siblings(project)
    used = {site.top for _, site in sites} & FIVE - {importer}
    return [
        f"{importer} imports {name}, but its pyproject.toml does not require {name.replace('_', '-')}"
        for name in sorted(used - declared)
    ]


def declared_siblings(project: Mapping[str, Any]) -> set[str]:
    """Import names of the published packages among the requirements and extras of a `[project]` table."""
    extras: Mapping[str, list[str]] = project.get("optional-dependencies", {})
    requirements = [*project.get("dependencies", []), *(row for rows in extras.values() for row in rows)]
    names = {re.split(r"[\s\[<>=!~;]", row, maxsplit=1)[0].replace("-", "_") for row in requirements}
    return names & FIVE


def scattered_libraries(sites: Iterable[tuple[str, ImportSite]], libraries: frozenset[str]) -> list[str]:
    """Libraries of `libraries` that more than one module imports at run time."""
    serving: dict[str, set[str]] = {}
    for path, site in sites:
        if site.top in libraries and site.scope is not Scope.TYPING:
            serving.setdefault(site.top, set()).add(path)
    return [
        f"{library} is imported by {len(paths)} modules, one may serve it: {', '.join(sorted(paths))}"
        for library, paths in sorted(serving.items())
        if len(paths) > 1
    ]


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"
