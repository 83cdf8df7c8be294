"""The texts of the repository speak of the project alone."""

from __future__ import annotations

import pytest

from contracts.wording import wording_violations
from contracts.workspace import ROOT, committed_files


def test_no_refused_wording_in_any_file():
    files = committed_files()
    assert ROOT / "pyproject.toml" in files
    rows = [row for path in files for row in wording_violations(path)]
    assert not rows, "\n".join(rows)


@pytest.mark.parametrize(
    ("folder", "rest"),
    [
        ("/wor" + "k/", "data"),
        ("see `/hom" + "e/", "me/models`"),
        ("C:\\User" + "s", "\\me"),
        ("https://pyp" + "i.org/", "simple"),
        ("https://files.pythonhoste" + "d.org/", "x"),
        ("fixes issu" + "e #", "12"),
        ("../share" + "d/", "design/style.md"),
    ],
)
def test_planted_wording_is_a_violation(tmp_path, folder, rest):
    path = tmp_path / "page.md"
    path.write_text(f"first line\n{folder}{rest}\n")
    (row,) = wording_violations(path)
    assert row.startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    "text", ["https://host.example/work/data", "network/work/x", "#### 12", "a token issue", "/tmp/run"]
)
def test_plain_text_is_no_violation(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    assert wording_violations(path) == []


def test_lock_and_binary_files_are_exempt(tmp_path):
    lock = tmp_path / "uv.lock"
    lock.write_text("https://pyp" + "i.org/simple")
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"\x89PNG\xff\xfe/wor" + b"k/x")
    assert wording_violations(lock) + wording_violations(picture) == []
