"""Metric files: readable at once, strict JSON, never over an earlier run, one line a step after a resume."""

import json
import sys
import time

import pytest
import torch

from rft_trainer.errors import ConfigurationError
from rft_trainer.report import JsonlLogger, LoggerGroup, MetricLogger, TensorBoardLogger, WandbLogger


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def rows(path):
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_step_can_be_read_before_the_file_is_closed(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.log(1, {"reward/mean": 0.25, "samples": 64, "loss": torch.tensor(0.5)})
    assert rows(path) == [{"step": 1, "reward/mean": 0.25, "samples": 64, "loss": 0.5}]
    logger.close()


def test_values_that_are_not_finite_stay_json(tmp_path):
    with JsonlLogger(tmp_path / "m.jsonl") as logger:
        logger.log(0, {"a": float("nan"), "b": float("inf"), "c": -float("inf")})
    (row,) = rows(tmp_path / "m.jsonl")
    assert row == {"step": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert float(row["c"]) == -float("inf")


def test_an_earlier_run_is_not_overwritten(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(ConfigurationError, match=r"m\.jsonl holds an earlier run"):
        JsonlLogger(path)
    assert path.read_text() == '{"step": 1}\n'


def test_resume_drops_later_steps_and_a_broken_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "x": 1}\n{"step": 2, "x": 2}\n{"step": 3, "x": 3}\n{"step": 4, "x"')
    with JsonlLogger(path, resume_after=2) as logger:
        logger.log(3, {"x": 30})
    assert rows(path) == [{"step": 1, "x": 1}, {"step": 2, "x": 2}, {"step": 3, "x": 30}]
    with JsonlLogger(tmp_path / "fresh.jsonl", resume_after=0) as logger:
        logger.log(1, {"x": 1})
    assert rows(tmp_path / "fresh.jsonl") == [{"step": 1, "x": 1}]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"m\.jsonl cannot be written.*choose another folder"):
        JsonlLogger(tmp_path / "file" / "m.jsonl")
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    with pytest.raises(ConfigurationError, match=r"tb cannot be written.*choose another folder"):
        TensorBoardLogger(tmp_path / "file" / "tb")


def scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_holds_every_scalar_and_hides_steps_run_again(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    logger = TensorBoardLogger(tmp_path)
    for step in (1, 2, 3):
        logger.log(step, {"reward/mean": step / 2})
    assert scalars(tmp_path, "reward/mean") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    logger.close()
    again = TensorBoardLogger(tmp_path, resume_after=2)
    again.log(3, {"reward/mean": 8.0})
    again.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.5), (2, 1.0), (3, 8.0)]


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigurationError, match=r"extra `tensorboard`.*pip install 'rft-trainer\[tensorboard\]'"):
        TensorBoardLogger(tmp_path)


def test_a_group_hands_on_to_each(tmp_path):
    group = LoggerGroup([JsonlLogger(tmp_path / "a.jsonl"), JsonlLogger(tmp_path / "b.jsonl")])
    assert isinstance(group, MetricLogger)
    group.log(5, {"x": 1})
    group.close()
    assert rows(tmp_path / "a.jsonl") == rows(tmp_path / "b.jsonl") == [{"step": 5, "x": 1}]
    with pytest.raises(ValueError, match="closed file"):
        group.log(6, {"x": 1})


def test_wandb_without_network(tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed: nothing is logged to wandb here")
    logger = WandbLogger(tmp_path / "wandb", project="tests", settings={"seed": 3})
    assert isinstance(logger, MetricLogger)
    logger.log(1, {"rollout/reward": 0.5})
    logger.close()
    name = (tmp_path / "wandb" / "run_id").read_text()
    files = list((tmp_path / "wandb").rglob(f"*{name}.wandb"))
    assert len(files) == 1
    # wandb's own process writes the file, and may do so after `finish` has returned.
    deadline = time.monotonic() + 60
    while b"rollout/reward" not in files[0].read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"rollout/reward" in files[0].read_bytes()
    again = WandbLogger(tmp_path / "wandb", project="tests", resume_after=1)
    again.log(2, {"rollout/reward": 0.75})
    again.close()
    assert (tmp_path / "wandb" / "run_id").read_text() == name


def test_wandb_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match=r"extra `wandb`.*pip install 'rft-trainer\[wandb\]'"):
        WandbLogger(tmp_path, project="tests")
