"""The report of a run: complete, within its bounds, inert, and working in a browser."""

import base64
import importlib.util
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rft_trainer.errors import ConfigurationError
from rft_trainer.report.__main__ import main
from rft_trainer.report.curves import curve_svg
from rft_trainer.report.page import read_rollouts, write_report

_spec = importlib.util.spec_from_file_location("report_pages", Path(__file__).with_name("pages.py"))
pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: the page is not opened in a browser")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = pages.make_run(tmp_path_factory.mktemp("runs") / "a <b> run")
    write_report(folder)
    return folder


class Scripts(HTMLParser):
    """Elements of a page, as a browser's parser would see them."""

    def __init__(self):
        super().__init__()
        self.tags = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)


def unpacked(text):
    """The groups of a page, as its script reads them."""
    lines = text.partition('id="packed">\n')[2].partition("\n</script>")[0].splitlines()
    return [json.loads(zlib.decompress(base64.b64decode(line), wbits=-15)) for line in lines]


def test_the_page_holds_every_response_and_loads_nothing(run):
    text = (run / "report.html").read_text()
    parser = Scripts()
    parser.feed(text)
    assert parser.tags.count("script") == 4
    assert "img" not in parser.tags
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text)
    found = [row for group in unpacked(text) for row in group]
    assert len(found) == 3 * 4 * 4
    assert found[0]["response"] == pages.HOSTILE
    assert {row["step"] for row in found} == {1, 2, 3}
    assert "<title>a &lt;b&gt; run</title>" in text


def test_curves_are_files_too(run):
    names = sorted(file.name for file in (run / "curves").iterdir())
    assert names == ["eval-accuracy.svg", "eval-accuracy_low.svg", "rollout-reward.svg", "train-kl.svg"]
    for name in names:
        xml.etree.ElementTree.parse(run / "curves" / name)


def test_a_curve_by_hand():
    picture = curve_svg("a<b", [0, 1, 2, 3], [0.0, 1.0, float("nan"), 2.0])
    path = re.search(r'd="(M[^"H]+)" fill="none"', picture).group(1)
    # 426 by 224 units from (78, 264) upwards; the gap at step 2 begins a new line.
    assert path == "M78.0 264.0L220.0 152.0M504.0 40.0"
    assert "a&lt;b" in picture
    assert "no finite value" in curve_svg("x", [0], [float("inf")])
    xml.etree.ElementTree.fromstring(curve_svg("x", [4], [2.0]))


def test_what_has_no_room_is_counted_and_every_step_keeps_some(run):
    whole, none = read_rollouts(run / "rollouts", 2**30)
    size = sum(len(line) for file in (run / "rollouts").iterdir() for line in file.read_text().splitlines())
    some, left_out = read_rollouts(run / "rollouts", size // 2)
    assert (len(whole), none) == (48, 0)
    assert len(some) + left_out == 48
    assert 8 <= len(some) < 30
    assert {row["step"] for row in some} == {1, 2, 3}
    assert len(some) % 4 == 0  # whole groups
    (run / "rollouts" / "rank1-000003.jsonl").write_text('{"left_out": 5}\n')
    assert read_rollouts(run / "rollouts", 2**30)[1] == 5
    (run / "rollouts" / "rank1-000003.jsonl").unlink()


def test_the_command(run, tmp_path, capsys):
    assert main([str(run)]) == 0
    assert "48 responses, 4 curves" in capsys.readouterr().out
    assert main([str(tmp_path)]) == 2
    assert "holds neither metrics.jsonl nor rollouts/" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="holds neither"):
        write_report(tmp_path)


def opened(run, state, *more):
    """The page's document after its script ran."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", *more]
    address = (run / "report.html").resolve().as_uri() + "#" + state
    done = subprocess.run([*command, "--dump-dom", address], capture_output=True, text=True, timeout=300, check=True)
    assert "data-ready=" in done.stdout, done.stderr[-2000:]
    return done.stdout


@needs_browser
def test_a_hostile_response_is_text(run):
    page = opened(run, "open=1/0")
    assert "owned" not in re.search("<title>.*?</title>", page).group()
    shown = page.partition('class="tokens"')[2].partition("</article>")[0]
    assert ">&lt;</span>" in shown  # its first token, as text
    assert "<img" not in shown
    assert page.count("<script") == 4


@needs_browser
def test_filters_and_groups(run):
    def count(state):
        return re.search(r'id="count"[^>]*>([^<]*)<', opened(run, state)).group(1)

    assert count("") == "48 of 48 responses, 12 groups"
    assert count("step_min=2&step_max=2") == "16 of 48 responses, 4 groups"
    assert count("truncated=1") == "12 of 48 responses, 12 groups"
    assert count("length_min=21") == "1 of 48 responses, 1 groups"
    assert count("text=onerror") == "1 of 48 responses, 1 groups"
    rewards = [(row["step"], row["group"], row["reward"]) for row in read_rollouts(run / "rollouts", 2**30)[0]]
    mixed = {(s, g) for s, g, r in rewards if any(r != other for t, h, other in rewards if (t, h) == (s, g))}
    assert mixed
    assert count("mixed=1") == f"{4 * len(mixed)} of 48 responses, {len(mixed)} groups"
    right = [row for row in rewards if row[2] >= 1]
    assert count("reward_min=1").startswith(f"{len(right)} of 48 responses")


@needs_browser
def test_tokens_have_colours_masks_and_the_same_prompt_is_compared(run):
    for colour in ("log-prob", "gap", "ratio", "advantage", "entropy"):
        page = opened(run, f"open=2/0&colour={colour}")
        assert len(re.findall(r'data-token="\d+" style="background: rgba', page)) == 4 * 20
    assert page.count('class="token untrained"') == 3  # tokens 0, 9 and 18 of sample 1
    assert page.count('class="flag">truncated') == 1
    assert "<h2>The same prompt over steps" in page
    assert "<del>" in page
    assert "<ins>" in page
    assert "<h2>The same prompt over steps" not in opened(run, "open=2/4")
