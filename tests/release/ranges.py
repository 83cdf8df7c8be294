"""Whether the ranges between siblings admit the versions in the tree; uv does not check it inside a workspace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def requirements_of(project: Mapping[str, Any]) -> list[Requirement]:
    """The requirements of a `[project]` table, those of its extras included."""
    extras: Mapping[str, list[str]] = project.get("optional-dependencies", {})
    rows = [*project.get("dependencies", []), *(row for rows in extras.values() for row in rows)]
    return [Requirement(row) for row in rows]


def refused_siblings(project: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
    """Requirements of `project` on a sibling whose version in the tree lies outside the range.

    Args:
        project: a `[project]` table.
        versions: canonical name -> version in the tree, of every package of the workspace.
    """
    rows = []
    for requirement in requirements_of(project):
        version = versions.get(canonicalize_name(requirement.name))
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            rows.append(f"{project['name']} requires {requirement}, but the tree holds {requirement.name} {version}")
    return rows


def open_ranges(project: Mapping[str, Any], siblings: Iterable[str]) -> list[str]:
    """Sibling requirements of a published package without a lower and an upper bound."""
    names = set(siblings)
    return [
        f"{project['name']} requires {requirement}; give both bounds, such as >=0.1,<0.2"
        for requirement in requirements_of(project)
        if canonicalize_name(requirement.name) in names
        and not {">=", "<"} <= {bound.operator for bound in requirement.specifier}
    ]
