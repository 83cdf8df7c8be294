"""The page of metrics knows every name in the source, and nothing twice."""

import re
from collections import Counter

from contracts.metrics_page import documented, undocumented
from contracts.workspace import ROOT

SOURCES = sorted((ROOT / "packages" / "rft-trainer" / "src").rglob("*.py"))
# A string that is the whole name of a metric.
LITERAL = re.compile(r'"((?:rollout|train|warm_start|sync|perf|memory)/[a-z_/]+)"')


def test_every_metric_in_the_source_is_documented_by_its_own_row():
    names = {name for file in SOURCES for name in LITERAL.findall(file.read_text(encoding="utf-8"))}
    assert len(names) > 20
    plain = {row.name for row in documented()}
    # A score of an app's recipe, and the beginnings of longer names.
    assert {name for name in names - plain if not name.endswith(("/", "_"))} <= {"rollout/accuracy"}


def test_rows_are_unique_and_complete():
    rows = documented()
    assert len(rows) > 50
    assert [name for name, count in Counter(row.name for row in rows).items() if count > 1] == []
    assert all(row.when for row in rows)


def test_places_match_names_and_nothing_else():
    assert undocumented(["rollout/reward", "eval/accuracy_strict_low", "eval/svamp/items", "perf/seconds_step"]) == []
    assert undocumented(["train/nothing", "eval/", "reward"]) == ["eval/", "reward", "train/nothing"]
