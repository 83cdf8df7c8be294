"""The stand-alone evaluation: a model folder, sets of different fields, and errors before anything is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rft_trainer.evaluate import main
from rft_trainer.testing import tiny_model_folder


def test_a_model_folder_on_two_sets(tmp_path):
    model = tiny_model_folder(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"question": f"{i}?", "answer": str(i)}) + "\n" for i in range(5))
    )
    (tmp_path / "b.jsonl").write_text(json.dumps({"problem": "one?", "answer": "1"}) + "\n")
    flags = [
        "--pretrain",
        model,
        "--fsdp",
        "--device",
        "cpu",
        "--generate_max_len",
        "4",
        "--output_dir",
        tmp_path / "out",
    ]
    sets = ["--eval_sets", tmp_path / "a.jsonl", f"{tmp_path / 'b.jsonl'},name=other,input_key=problem"]
    command = [sys.executable, "-m", "rft_trainer.evaluate", *map(str, flags), *map(str, sets)]
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "out" / "evaluate" / "metrics.json").read_text())
    assert (metrics["eval/a/items"], metrics["eval/other/items"]) == (5, 1)
    for kind in ("strict", "flexible", "boxed"):
        assert 0 <= metrics[f"eval/a/accuracy_{kind}_low"] <= metrics[f"eval/a/accuracy_{kind}_high"] <= 1
    rows = (tmp_path / "out" / "evaluate" / "evaluation" / "a_000000.rank0.jsonl").read_text().splitlines()
    assert [json.loads(row)["item"] for row in rows] == list(range(5))
    assert "accuracy_boxed" in done.stdout


def test_what_is_missing_is_named(tmp_path, capsys):
    def error(*flags):
        assert main([str(flag) for flag in flags]) == 2
        return capsys.readouterr().err

    assert "pretrain is not set" in error()
    model = tiny_model_folder(tmp_path / "model")
    assert "nothing to evaluate" in error("--pretrain", model)
    assert f"{tmp_path / 'no.jsonl'} is not a file" in error("--pretrain", model, "--eval_sets", tmp_path / "no.jsonl")
    assert "no manifest.json there" in error("--pretrain", model, "--resume_from", Path(tmp_path))
