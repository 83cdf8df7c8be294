"""Releases, rehearsed on a scratch copy of the repository with the command that makes them."""

from __future__ import annotations

import re

import pytest
from packaging.version import Version

from contracts.workspace import packages
from release.commands import git
from release.preparation import ReleaseError, breaking_range
from release.rehearsal import DATE, Rehearsal, first_releases, refused, resolved
from release.wheels import metadata

NAMES = [package.name for package in packages()]
OTHERS = [name for name in NAMES if name != "rft-sync"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return first_releases(tmp_path_factory.mktemp("rehearsal") / "repository")


@pytest.fixture
def published(repository, tmp_path):
    """A repository in which every package was released once, at the version in the tree."""
    return Rehearsal(repository, tmp_path)


def test_first_releases_tag_each_package_and_resolve_together(published):
    assert published.tags() == sorted(f"{name}-v0.1.0" for name in NAMES)
    assert resolved(published.index(), "rft-trainer") == dict.fromkeys(NAMES, "0.1.0")
    assert git(published.root, "status", "--porcelain") == ""


def test_one_package_is_released_alone_and_the_others_still_resolve(published):
    published.change("rft-sync", "window.added", "A window over which weights may lag.")
    before = {name: git(published.root, "rev-parse", f"HEAD:packages/{name}") for name in NAMES}
    wheel = published.release("rft-sync", "0.1.1")
    after = {name: git(published.root, "rev-parse", f"HEAD:packages/{name}") for name in NAMES}
    assert str(metadata(wheel).version) == "0.1.1"
    assert [name for name in NAMES if before[name] != after[name]] == ["rft-sync"]
    notes = (published.root / "packages/rft-sync/CHANGELOG.md").read_text()
    entry = rf"(?s)0\.1\.1 \({DATE}\)\s.*Added\s.*A window over which weights may lag\..*0\.1\.0 \({DATE}\)"
    assert re.search(entry, notes)
    assert not list((published.root / "packages/rft-sync/changelog.d").glob("*.md"))
    assert resolved(published.index(), "rft-trainer") == {**dict.fromkeys(NAMES, "0.1.0"), "rft-sync": "0.1.1"}


def test_a_minor_version_released_alone_is_refused_by_the_published_trainer(published):
    published.change("rft-sync", "names.changed")
    with pytest.raises(ReleaseError, match=r"(?s)rft-trainer requires rft-sync<0\.2,>=0\.1.*--move-ranges"):
        published.release("rft-sync", "0.2.0")
    published.release("rft-sync", "0.2.0", move_ranges=True)
    index = published.index()
    assert {name: published.version(name) for name in OTHERS} == dict.fromkeys(OTHERS, "0.1.0")
    assert resolved(index, "rft-sync") == {"rft-sync": "0.2.0"}
    assert resolved(index, "rft-trainer") == dict.fromkeys(NAMES, "0.1.0")
    assert "rft-sync<0.2" in refused(index, "rft-trainer", "rft-sync==0.2.0")
    moved = (published.root / "packages/rft-trainer/pyproject.toml").read_text()
    assert moved.count('"rft-sync>=0.2,<0.3"') == moved.count('"rft-sync[deepspeed]>=0.2,<0.3"') == 1


def test_a_breaking_version_is_refused_by_all_published_ranges_until_they_move(published):
    published.change("rft-dist", "layout.removed")
    published.release("rft-dist", "0.2.0", move_ranges=True)
    index = published.index()
    for name in ("rft-engines", "rft-trainer"):
        assert resolved(index, name)["rft-dist"] == "0.1.0"
        assert "rft-dist<0.2" in refused(index, name, "rft-dist==0.2.0")
    # The trainer's range has moved in the tree; the engines that are published still refuse the new rft-dist.
    with pytest.raises(ReleaseError, match=r"(?s)siblings that refuse each other.*rft-engines requires rft-dist"):
        published.release("rft-trainer", "0.1.1")
    published.release("rft-engines", "0.1.1")
    published.release("rft-trainer", "0.1.1")
    newest = {**dict.fromkeys(NAMES, "0.1.0"), "rft-dist": "0.2.0", "rft-engines": "0.1.1", "rft-trainer": "0.1.1"}
    assert resolved(published.index(), "rft-trainer") == newest


def test_two_packages_are_released_on_the_same_day(published):
    for name in ("rft-rewards", "rft-sync"):
        published.change(name, "more.added")
    for name in ("rft-rewards", "rft-sync"):
        published.release(name, "0.1.1")
    newest = {**dict.fromkeys(NAMES, "0.1.0"), "rft-rewards": "0.1.1", "rft-sync": "0.1.1"}
    assert resolved(published.index(), "rft-trainer") == newest
    for name in ("rft-rewards", "rft-sync"):
        assert f"0.1.1 ({DATE})" in (published.root / "packages" / name / "CHANGELOG.md").read_text()
        assert f"{name}-v0.1.1" in published.tags()


def test_what_cannot_be_released_is_refused_and_changes_nothing(published):
    before = git(published.root, "rev-parse", "HEAD"), published.tags()
    for package, version, reason in (
        ("rft-none", "0.1.0", "no package 'rft-none': give one of rft-dist"),
        ("rft-sync", "0.1.1", "nothing to release: no fragment"),
        ("rft-sync", "0.1.0", "is at 0.1.0"),
        ("rft-sync", "0.0.9", "give a higher one"),
        ("rft-sync", "0.3", "give three numbers"),
        ("rft-sync", "0.3.0rc1", "give three numbers"),
    ):
        with pytest.raises(ReleaseError, match=reason):
            published.release(package, version)
    (published.root / "packages/rft-sync/README.md").write_text("Not committed.\n")
    with pytest.raises(ReleaseError, match="not committed"):
        published.release("rft-sync", "0.1.1")
    assert (git(published.root, "rev-parse", "HEAD"), published.tags()) == before


def test_a_break_needs_its_fragment_and_a_version_that_may_break(published):
    source = published.root / "packages/rft-sync/src/rft_sync/fusion.py"
    source.write_text(source.read_text().replace("def fused_groups(", "def fused_groups(wanted: int, "))
    published.change("rft-sync", "groups.fixed")
    with pytest.raises(ReleaseError, match=r"no changed or removed fragment tells of these breaks:\n.*wanted"):
        published.release("rft-sync", "0.2.0")
    published.change("rft-sync", "groups.changed")
    with pytest.raises(ReleaseError, match=r"0\.1\.1 promises compatibility, and these are breaks:\n.*wanted"):
        published.release("rft-sync", "0.1.1")
    before = git(published.root, "rev-parse", "HEAD")
    wheel = published.release("rft-sync", "0.2.0", move_ranges=True, write=False)
    assert metadata(wheel).version == Version("0.2.0")
    assert (git(published.root, "rev-parse", "HEAD"), published.version("rft-sync")) == (before, "0.1.0")
    assert "rft-sync-v0.2.0" not in published.tags()


@pytest.mark.parametrize(
    ("version", "admitted"),
    [("0.2.0", ">=0.2,<0.3"), ("0.2.7", ">=0.2,<0.3"), ("1.0.0", ">=1.0,<2"), ("1.4.2", ">=1.4,<2")],
)
def test_ranges_end_before_the_next_version_that_may_break(version, admitted):
    assert breaking_range(version) == admitted
