"""Cards of results from synthetic run folders, every figure worked out by hand."""

import gzip
import importlib.util
import json
import re
from pathlib import Path

import pytest
from gsm8k_app.result_card import card, keep_files, read_seeds, replace_section, stages
from gsm8k_app.run_records import read_run, reinforcement_seconds

from rft_trainer.errors import ConfigurationError

SCRIPT = Path(__file__).parents[2] / "apps" / "gsm8k" / "card.py"


def write_evaluation(folder, name, items, *, compress=False):
    """One file for each of two ranks; an item is a list of (strict, flexible, symbolic) scores of its samples."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in (0, 1):
        lines = []
        for item in range(rank, len(items), 2):
            for sample, scores in enumerate(items[item]):
                names = ("accuracy_strict", "accuracy_flexible", "accuracy_symbolic")
                extracted = {key: {"answer": "1", "score": score} for key, score in zip(names, scores, strict=True)}
                lines.append(json.dumps({"item": item, "sample": sample, "extracted": extracted}) + "\n")
        content = "".join(lines).encode()
        file = folder / f"{name}.rank{rank}.jsonl"
        if compress:
            file.with_name(file.name + ".gz").write_bytes(gzip.compress(content))
        else:
            file.write_bytes(content)


def samples(*right):
    """An item of eight samples for each number; the first so many are right by all three extractors."""
    return [[(1, 1, 1)] * count + [(0, 0, 0)] * (8 - count) for count in right]


def write_run(folder, evaluations, *, rounds=0, warm=None, ranks=1, settings=None, dynamic=True):
    """A run whose rounds took 10, 11, ... s and whose evaluations took 5 s each."""
    folder.mkdir(parents=True)
    chosen = {"eval_temperature": 1.0, "dataset": "/tmp/elsewhere/gsm8k/train.jsonl", "seed": 1, **(settings or {})}
    (folder / "config.json").write_text(json.dumps(chosen))
    rows = [{"step": step, "eval/accuracy": 0.5, "perf/seconds_evaluate": 5.0} for step in evaluations]
    for step in range(1, rounds + 1):
        tokens = {"rollout/sampled_tokens": 1000.0 * step} if dynamic else {}
        length = {"rollout/response_length": 50.0, "rollout/responses": 16.0}
        rows.append({"step": step, "rollout/reward": 0.1 * step, "perf/seconds_step": 9.0 + step, **length, **tokens})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "command": ["--recipe", "smollm2-gsm8k", "--dataset", "/tmp/elsewhere/gsm8k/train.jsonl", "--seed", "1"],
        "seconds": 100.0,
        "ranks": ranks,
        "device": "a card",
        "versions": {"python": "3.12.3", "torch": "2.11.0"},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    if warm is not None:
        (folder / "warm_start.json").write_text(json.dumps(warm))
    for step, (greedy, sampled) in evaluations.items():
        write_evaluation(folder / "evaluation", f"greedy_{step:06d}", greedy)
        write_evaluation(folder / "evaluation", f"eval_{step:06d}", sampled)


@pytest.fixture
def runs(tmp_path):
    """Two seeds, the second without a control; four problems."""
    root = tmp_path / "runs"
    none, one = [[(0, 0, 0)]], [[(1, 1, 1)]]
    form_only = [[(0, 1, 1)]]
    warm = {"steps": 350, "tokens": 4000, "seconds": 70.0}
    before = (none * 3 + one, samples(0, 0, 0, 4))
    write_run(root / "base", {0: (none * 4, samples(0, 0, 0, 0))})
    # seed 1: greedy strict 1 of 4, then 3 of 4; seed 2: 1 of 4, then 2 of 4 and one more without the form
    write_run(root / "seed_1/reinforcement", {0: before, 3: (one * 3 + none, samples(8, 8, 1, 0))}, rounds=3, warm=warm)
    after = (one * 2 + form_only + none, samples(8, 4, 0, 0))
    write_run(root / "seed_2/reinforcement", {0: before, 2: after}, rounds=2, warm=warm, ranks=2)
    write_run(
        root / "seed_1/control", {0: (one + none * 3, samples(8, 0, 0, 0))}, warm={**warm, "seconds": 33.0, "steps": 9}
    )
    return root


def cells(page, *start):
    """The rest of the one table row of each measure that begins with these cells."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return [row[len(start) :] for row in rows if row[: len(start)] == list(start)]


def test_means_and_spreads_by_hand(runs):
    page = card(read_seeds(runs), title="GSM8K")
    greedy, sampled, best = range(3)
    assert cells(page, "base", "strict")[greedy] == ["0.0", "0.0", "0.0", "0.0"]
    assert cells(page, "warm start", "strict")[greedy] == ["25.0", "25.0", "25.0", "0.0"]
    # 75 and 50: mean 62.5, deviation sqrt(2 * 12.5^2 / 1) = 17.7
    assert cells(page, "reinforcement", "strict")[greedy] == ["75.0", "50.0", "62.5", "17.7"]
    # the answer without the form: 75 and 75
    assert cells(page, "reinforcement", "flexible")[greedy] == ["75.0", "75.0", "75.0", "0.0"]
    assert cells(page, "reinforcement", "symbolic")[greedy] == ["75.0", "75.0", "75.0", "0.0"]
    assert cells(page, "control", "strict")[greedy] == ["25.0", "not run", "25.0", "-"]
    # +50 and +25
    assert cells(page, "reinforcement over warm start", "strict")[greedy] == ["+50.0", "+25.0", "+37.5", "17.7"]
    assert cells(page, "reinforcement over control", "strict")[greedy] == ["+50.0", "not run", "+50.0", "-"]
    # (8 + 8 + 1 + 0) / 32 and (8 + 4) / 32
    assert cells(page, "reinforcement", "strict")[sampled] == ["53.1", "37.5", "45.3", "11.0"]
    # with 8 of 8 samples drawn, one right one is enough: 3 and 2 of 4 problems
    assert cells(page, "reinforcement", "strict")[best] == ["75.0", "50.0", "62.5", "17.7"]
    assert cells(page, "warm start", "strict")[best] == ["25.0", "25.0", "25.0", "0.0"]


def test_costs_are_device_seconds_and_what_was_not_run_is_named(runs):
    page = card(read_seeds(runs), title="GSM8K")
    # rounds of 10 + 11 + 12 s and 1000 + 2000 + 3000 tokens; two evaluations of 5 s
    assert cells(page, "seed 1, reinforcement")[0] == ["350", "4,000", "70.0", "3", "6,000", "33.0", "10.0", "100.0"]
    # 10 + 11 s on two ranks
    assert cells(page, "seed 2, reinforcement")[0] == ["350", "4,000", "140.0", "2", "3,000", "42.0", "20.0", "200.0"]
    assert cells(page, "seed 1, control")[0] == ["9", "4,000", "33.0", "0", "0", "0.0", "5.0", "100.0"]
    assert cells(page, "seed 2, control")[0] == ["not run"] * 8
    assert "--dataset gsm8k/train.jsonl --seed 1" in page
    assert "/tmp/elsewhere" not in page
    assert "1 x a card; 2 x a card" in page
    assert reinforcement_seconds(runs / "seed_1/reinforcement") == 33.0


def test_a_run_without_warm_start_has_its_own_base_and_greedy_scores_only(tmp_path):
    """The quickstart's form: one greedy evaluation before and one after, extracted when the card is made."""
    folder = tmp_path / "runs/seed_0"
    write_run(folder, {}, rounds=1, settings={"eval_temperature": 0.0}, dynamic=False)
    (folder / "evaluation").mkdir()
    for step, texts in ((0, ["#### 3", "it is 4"]), (1, ["#### 3", "#### 4"])):
        rows = [
            {"item": item, "sample": 0, "response": text, "reference": str(3 + item), "scores": {}}
            for item, text in enumerate(texts)
        ]
        file = folder / "evaluation" / f"eval_{step:06d}.rank0.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = card(read_seeds(tmp_path / "runs"), title="Quickstart")
    assert cells(page, "base", "strict") == [["50.0", "50.0", "-"]]
    assert cells(page, "base", "flexible") == [["100.0", "100.0", "-"]]
    assert cells(page, "base", "symbolic") == [["100.0", "100.0", "-"]]
    assert cells(page, "reinforcement over base", "strict") == [["+50.0", "+50.0", "-"]]
    assert cells(page, "warm start", "strict") == [["not run", "not run", "-"]]
    assert page.count("Not run.") == 2
    # 16 responses of 50 tokens
    assert cells(page, "seed 0, reinforcement")[0][4] == "800"


def test_packed_items_are_read_too(tmp_path):
    write_run(tmp_path / "run", {}, settings={"eval_temperature": 0.0})
    write_evaluation(tmp_path / "run/evaluation", "eval_000000", [[(1, 1, 1)], [(0, 0, 1)]], compress=True)
    assert read_run(tmp_path / "run").accuracies[0].greedy == {"strict": 0.5, "flexible": 0.5, "symbolic": 1.0}


def test_files_that_belong_to_a_card(runs, tmp_path):
    seeds = read_seeds(runs)
    lines = keep_files(seeds, tmp_path / "kept")
    assert {"base.json", "reinforcement.json", "control.json", "seed_1-rollout-reward.svg"} <= {
        file.name for file in (tmp_path / "kept").iterdir()
    }
    assert json.loads((tmp_path / "kept/base.json").read_text())["dataset"] == "gsm8k/train.jsonl"
    assert "![rollout/reward](kept/seed_2-rollout-reward.svg)" in lines


def test_a_section_is_replaced_and_the_rest_stays():
    page = replace_section("# Results\n", "one", "first")
    page = replace_section(page, "two", "second")
    page = replace_section(page, "one", "third")
    assert re.sub(r"\s+", " ", page) == (
        "# Results <!-- card one --> third <!-- end of card one --> <!-- card two --> second <!-- end of card two --> "
    )
    with pytest.raises(ConfigurationError, match="without '<!-- end of card one -->'"):
        replace_section("<!-- card one -->", "one", "text")


@pytest.fixture
def command():
    spec = importlib.util.spec_from_file_location("gsm8k_card", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_the_command(command, runs, tmp_path, capsys):
    page = tmp_path / "RESULTS.md"
    assert command([str(runs), "--section", "gpu", "--title", "On a GPU", "--page", str(page)]) == 0
    assert "## On a GPU" in page.read_text()
    assert (tmp_path / "gpu/control.json").is_file()
    assert command(["--seconds_of", str(runs / "seed_1/reinforcement")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "33.0"
    assert command(["--seconds_of", str(runs / "base")]) == 2
    assert "no round of reinforcement" in capsys.readouterr().err
    assert command([str(tmp_path / "nothing"), "--section", "gpu", "--page", str(page)]) == 2
    assert "no folder seed_N" in capsys.readouterr().err


def test_a_stage_takes_the_last_evaluation(runs):
    first = stages(read_seeds(runs)[0])
    assert first["reinforcement"].greedy["strict"] == 0.75
    assert first["control"].greedy["strict"] == 0.25
    assert first["base"].items == 4
