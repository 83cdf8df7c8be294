"""Rollout files: every field of every response, within the limits on size."""

import json

import pytest

from rft_trainer.errors import ConfigurationError
from rft_trainer.report import Rollout, RolloutWriter


def make(response="3 + 4 = 7\n#### 7", **changes):
    fields = {
        "prompt_id": "train:1",
        "prompt": "3 + 4?",
        "response": response,
        "reference": "7",
        "reward": 0.9,
        "scores": {"exact": 1.0, "format": 0.0},
        "length": 3,
        "truncated": False,
        "advantage": -0.5,
        "engine_log_probs": (-0.123456789, -2.0, -0.25),
        "trainer_log_probs": (-0.1234599, -2.0, -0.25),
        "weights_version": 4,
    }
    return Rollout(**{**fields, **changes})


def rows(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_file_a_step_with_every_field(tmp_path):
    writer = RolloutWriter(tmp_path / "rollouts")
    path = writer.write(12, [make(), make("∠ABC ü", truncated=True)])
    assert path == tmp_path / "rollouts" / "train-000012.jsonl"
    first, second = rows(path)
    assert first == {
        "prompt_id": "train:1",
        "prompt": "3 + 4?",
        "response": "3 + 4 = 7\n#### 7",
        "reference": "7",
        "reward": 0.9,
        "scores": {"exact": 1.0, "format": 0.0},
        "length": 3,
        "truncated": False,
        "advantage": -0.5,
        "engine_log_probs": [-0.12346, -2.0, -0.25],
        "trainer_log_probs": [-0.12346, -2.0, -0.25],
        "weights_version": 4,
    }
    assert (second["response"], second["truncated"]) == ("∠ABC ü", True)
    assert "∠ABC" in path.read_text(encoding="utf-8")  # readable without a program


def test_half_a_character_does_not_stop_the_run(tmp_path):
    path = RolloutWriter(tmp_path).write(0, [make("cut \ud83d")])
    assert "cut" in rows(path)[0]["response"]


def test_a_step_is_limited_and_says_what_it_leaves_out(tmp_path):
    size = RolloutWriter(tmp_path).write(0, [make()]).stat().st_size
    path = RolloutWriter(tmp_path, max_step_bytes=2 * size).write(1, [make()] * 5)
    assert [row.get("prompt_id") for row in rows(path)] == ["train:1", "train:1", None]
    assert rows(path)[-1] == {"left_out": 3}
    assert RolloutWriter(tmp_path, max_step_bytes=0).write(2, [make()]) is None


def test_the_oldest_files_make_room(tmp_path):
    size = RolloutWriter(tmp_path).write(0, [make()]).stat().st_size
    writer = RolloutWriter(tmp_path, max_total_bytes=2 * size)
    other = RolloutWriter(tmp_path, name="eval").write(0, [make()])
    for step in range(1, 5):
        writer.write(step, [make()])
    assert sorted(path.name for path in tmp_path.glob("train-*")) == ["train-000003.jsonl", "train-000004.jsonl"]
    assert other.exists()
    RolloutWriter(tmp_path, max_total_bytes=0).write(5, [make()])
    assert [path.name for path in tmp_path.glob("train-*")] == ["train-000005.jsonl"]


def test_bad_settings_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match="max_step_bytes is -1"):
        RolloutWriter(tmp_path, max_step_bytes=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be made"):
        RolloutWriter(tmp_path / "file" / "rollouts")
