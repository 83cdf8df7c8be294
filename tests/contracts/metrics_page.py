"""The list of metrics in docs/metrics.md, as patterns."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from contracts.workspace import ROOT

PAGE = ROOT / "docs" / "metrics.md"


@dataclass(frozen=True)
class DocumentedMetric:
    """A row of the page: the name with its places in angle brackets, and when it is logged."""

    name: str
    when: str

    def matches(self, metric: str) -> bool:
        """Whether a logged name is this one; a place holds anything, `<set>/` also nothing."""
        pattern = "".join(
            r"(?:.+/)?" if part == "<set>/" else ".+" if part.startswith("<") else re.escape(part)
            for part in re.split(r"(<set>/|<\w+>)", self.name)
        )
        return re.fullmatch(pattern, metric) is not None


def documented() -> list[DocumentedMetric]:
    """Every row of the page's tables."""
    rows = [
        line.strip("|").split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    return [DocumentedMetric(row[0].strip().strip("`"), row[-1].strip()) for row in rows]


def undocumented(metrics: Iterable[str]) -> list[str]:
    """Logged names that no row describes; a score may have any name, so its row alone counts for names of one part."""
    rows = documented()
    return sorted(name for name in metrics if not any(row.matches(name) for row in rows))
