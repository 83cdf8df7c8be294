"""The workflows run exactly the actions that were read, whatever becomes of a tag, and only one job may upload."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contracts.workspace import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
USE = re.compile(r"^\s*(?:- )?uses:\s*(?P<action>.*?)\s*$")
PINNED = re.compile(r"(?P<name>[\w.-]+/[\w./-]+)@(?P<commit>[0-9a-f]{40}) # (?P<version>v\d+\.\d+\.\d+)")


def actions(text: str) -> list[str]:
    """What a workflow uses, comment included."""
    return [found["action"] for found in map(USE.match, text.splitlines()) if found]


def pinning_violations(texts: dict[str, str]) -> list[str]:
    """Actions without hash and version, and actions with two."""
    rows: list[str] = []
    known: dict[str, str] = {}
    for file, text in texts.items():
        for action in actions(text):
            pinned = PINNED.fullmatch(action)
            if pinned is None:
                rows.append(f"{file}: {action}: write owner/name@<40 hex digits> # v1.2.3")
            elif known.setdefault(pinned["name"], action) != action:
                rows.append(f"{file}: {action}, but elsewhere {known[pinned['name']]}")
    return rows


def read(paths: list[Path]) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def test_every_action_is_pinned_by_hash_and_names_its_version():
    found = [action for text in read(WORKFLOWS).values() for action in actions(text)]
    assert len(found) >= 8
    assert pinning_violations(read(WORKFLOWS)) == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("      - uses: actions/checkout@v4", "40 hex digits"),
        ("        uses: actions/checkout@11bd71901bbe5b1630ceea73d27597364c9af683", "40 hex digits"),
        ("      - uses: actions/checkout@11bd719 # v4.2.2", "40 hex digits"),
        (f"      - uses: actions/checkout@{'0' * 40} # v4.2.2", "but elsewhere"),
        ("      - uses: actions/checkout@11bd71901bbe5b1630ceea73d27597364c9af683 # v4.2.2", None),
    ],
)
def test_planted_actions(line, complaint):
    rows = pinning_violations({**read(WORKFLOWS), "planted.yml": line})
    assert (rows == []) if complaint is None else len(rows) == 1 and complaint in rows[0]


def test_only_the_publishing_job_may_ask_for_an_upload_token():
    jobs = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8").partition("\njobs:\n")[2]
    by_name = dict(
        zip(re.findall(r"^  (\w+):$", jobs, re.M), re.split(r"^  \w+:\n", jobs, flags=re.M)[1:], strict=True)
    )
    assert list(by_name) == ["build", "publish"]
    assert [name for name, text in by_name.items() if "id-token: write" in text] == ["publish"]
    assert "needs: build" in by_name["publish"]
    assert "checkout" not in by_name["publish"]
    assert all("id-token" not in text for name, text in read(WORKFLOWS).items() if name != "release.yml")
