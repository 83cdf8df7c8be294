"""Text that must stand nowhere in the repository: paths of one machine, hosts of registries, numbers of issues."""

from __future__ import annotations

import re
from pathlib import Path

# Each pattern is written so that it does not match its own line here.
REFUSED = {
    "a path of one machine": re.compile(r"(?<![\w./~}-])/(?:wor[k]|roo[t]|hom[e]|mn[t]|User[s])/[\w.-]+"),
    "a drive of one machine": re.compile(r"\b[A-Z]:\\(?:User[s]|Program)"),
    "a host of a package registry": re.compile(
        r"\b(?:(?:test\.)?pyp[i]\.org|[\w.-]*pythonhoste[d]\.org|download\.pytorc[h]\.org|[\w.-]*anacond[a]\.(?:org|com))\b"
    ),
    "the number of an issue": re.compile(r"\bissues?\s+#?\d+\b", re.IGNORECASE),
    "a reference folder outside the repository": re.compile(r"\bshare[d]/(?:design|reference|cases|hooks|gpu_host)\b"),
}
EXEMPT = frozenset({"uv.lock"})


def wording_violations(path: Path) -> list[str]:
    """Lines of a text file that hold a refused wording; binary files hold none."""
    if path.name in EXEMPT:
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []
    return [
        f"{path}:{number}: {kind}: {match.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for kind, pattern in REFUSED.items()
        if (match := pattern.search(line))
    ]
