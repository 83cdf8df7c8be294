"""Rollout files: every field of every response, within the limits on size."""

import json

import pytest

from rft_trainer.errors import ConfigurationError
from rft_trainer.report import Rollout, RolloutWriter, token_texts
from rft_trainer.testing import byte_tokenizer


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


def write(writer, step, rollouts):
    return writer.write(step, rollouts, count=len(rollouts))


def rows(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_file_a_step_with_every_field(tmp_path):
    writer = RolloutWriter(tmp_path / "rollouts")
    path = write(writer, 12, [make(), make("∠ABC ü", truncated=True)])
    assert path == tmp_path / "rollouts" / "train-000012.jsonl"
    first, second = rows(path)
    assert first == {
        "group": 0,
        "prompt_id": "train:1",
        "prompt": "3 + 4?",
        "response": "3 + 4 = 7\n#### 7",
        "reference": "7",
        "label": "default",
        "reward": 0.9,
        "scores": {"exact": 1.0, "format": 0.0},
        "length": 3,
        "truncated": False,
        "advantage": -0.5,
        "token_ids": [],
        "tokens": [],
        "engine_log_probs": [-0.12346, -2.0, -0.25],
        "trainer_log_probs": [-0.12346, -2.0, -0.25],
        "ratios": [],
        "advantages": [],
        "entropies": [],
        "mask": [],
        "weights_version": 4,
    }
    assert (second["response"], second["truncated"]) == ("∠ABC ü", True)
    assert "∠ABC" in path.read_text(encoding="utf-8")  # readable without a program


def test_half_a_character_does_not_stop_the_run(tmp_path):
    path = write(RolloutWriter(tmp_path), 0, [make("cut \ud83d")])
    assert "cut" in rows(path)[0]["response"]


def test_a_step_is_limited_and_says_what_it_leaves_out(tmp_path):
    size = write(RolloutWriter(tmp_path), 0, [make()]).stat().st_size
    path = write(RolloutWriter(tmp_path, max_step_bytes=2 * size), 1, [make()] * 5)
    assert [row.get("prompt_id") for row in rows(path)] == ["train:1", "train:1", None]
    assert rows(path)[-1] == {"left_out": 3}
    assert write(RolloutWriter(tmp_path, max_step_bytes=0), 2, [make()]) is None


def test_rollouts_without_room_are_not_even_made(tmp_path):
    size = write(RolloutWriter(tmp_path), 0, [make()]).stat().st_size
    made = (make() if number < 3 else pytest.fail("made for nothing") for number in range(100))
    path = RolloutWriter(tmp_path, max_step_bytes=2 * size).write(1, made, count=100)
    assert rows(path)[-1] == {"left_out": 98}


@pytest.mark.parametrize("text", ["3 + 4 = 7", "né ∠ABC 🙂🙂 x", "", "🙂"])
def test_texts_of_tokens_are_the_whole_text(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    texts = token_texts(ids, tokenizer.decode)
    assert len(texts) == len(ids)
    assert "".join(texts) == text
    if "∠" in text:
        place = ids.index(ids[len(tokenizer("né ")["input_ids"])])
        assert texts[place : place + 3] == ["", "", "∠"]


def test_half_a_character_at_the_end_is_shown_as_such():
    tokenizer = byte_tokenizer()
    ids = tokenizer("ab🙂")["input_ids"][:-1]
    assert token_texts(ids, tokenizer.decode) == ["a", "b", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_the_oldest_files_make_room(tmp_path):
    size = write(RolloutWriter(tmp_path), 0, [make()]).stat().st_size
    writer = RolloutWriter(tmp_path, max_total_bytes=2 * size)
    other = write(RolloutWriter(tmp_path, name="eval"), 0, [make()])
    for step in range(1, 5):
        write(writer, step, [make()])
    assert sorted(path.name for path in tmp_path.glob("train-*")) == ["train-000003.jsonl", "train-000004.jsonl"]
    assert other.exists()
    write(RolloutWriter(tmp_path, max_total_bytes=0), 5, [make()])
    assert [path.name for path in tmp_path.glob("train-*")] == ["train-000005.jsonl"]


def test_bad_settings_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match="max_step_bytes is -1"):
        RolloutWriter(tmp_path, max_step_bytes=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be made"):
        RolloutWriter(tmp_path / "file" / "rollouts")
