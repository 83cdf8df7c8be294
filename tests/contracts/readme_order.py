"""The order in which a package's README answers a stranger's questions."""

from __future__ import annotations

from pathlib import Path

ORDER = (
    "## Who should use it alone",
    "## Install",
    "## Ten lines that run",
    "## Public names",
    "## Guarantees and errors",
    "## Versions",
)


def order_violations(path: Path) -> list[str]:
    """Headings of `ORDER` that are missing or out of order; before the first stands what the package is for."""
    lines = path.read_text(encoding="utf-8").splitlines()
    places = [lines.index(heading) if heading in lines else -1 for heading in ORDER]
    rows = [f"{path}: no heading {heading!r}" for heading, place in zip(ORDER, places, strict=True) if place < 0]
    if not rows and places != sorted(places):
        rows.append(f"{path}: the order of the headings is {', '.join(ORDER)}")
    if not rows and not any(lines[1 : places[0]]):
        rows.append(f"{path}: say before the first heading what the package is for")
    return rows
