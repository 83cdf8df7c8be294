"""The page on troubleshooting quotes messages that exist, and names flags and metrics that exist."""

import re
from dataclasses import fields

from contracts.workspace import ROOT
from rft_trainer import RFTConfig

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
TEXT = "\n".join(file.read_text(encoding="utf-8") for file in sorted(ROOT.glob("packages/*/src/**/*.py")))
# Adjacent literals are one message.
JOINED = re.sub(r'"\s*\n\s*f?"', "", TEXT)
QUOTED = re.findall(r"`([^`]+)`", PAGE)


def test_every_quoted_message_stands_in_a_source():
    messages = [quote for quote in QUOTED if " " in quote and not quote.startswith("--")]
    assert len(messages) > 10
    assert [message for message in messages if message not in JOINED] == []


def test_every_flag_is_a_setting():
    names = {item.name for item in fields(RFTConfig)}
    flags = {quote.removeprefix("--").split()[0] for quote in QUOTED if quote.startswith("--")}
    assert flags - names == set()


def test_every_metric_is_written_somewhere():
    metrics = {quote for quote in QUOTED if re.fullmatch(r"(rollout|train|perf|memory|sync)/[\w/]+", quote)}
    assert len(metrics) >= 6
    # The phases' seconds and the moves are named by what they count.
    made = {"perf/seconds_sync": "perf/seconds_"}
    for direction in ("offload", "reload"):
        made |= {f"memory/{direction}_{what}": f"_{what}" for what in ("seconds", "gigabytes_per_second")}
    assert [name for name in metrics if made.get(name, name.rpartition("/")[2]) not in TEXT] == []


def test_every_check_names_tests_and_errors_that_exist():
    table = PAGE.partition("## Every operational check")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 11
    for row in rows:
        named = re.findall(r"`([\w/.-]+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {test}"
        for error in re.findall(r"`(\w+(?:Error|Mismatch|Failed))`", row):
            assert f"class {error}(" in TEXT, error
