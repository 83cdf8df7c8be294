"""What a run leaves behind."""

import io
import json

import pytest
import torch
from rft_trainer.experience import Experience
from rft_trainer.report import Console, JsonlLogger, RolloutWriter, TensorBoardLogger


def experience(text="#### 5"):
    return Experience(
        group=2,
        prompt_ids=torch.tensor([1, 2]),
        response_ids=torch.tensor([3, 4]),
        response_mask=torch.ones(2, dtype=torch.bool),
        engine_log_probs=torch.tensor([-0.5, -0.25]),
        weights_version=7,
        truncated=False,
        prompt="2 + 3?",
        response=text,
        reference="#### 5",
        reward=1.0,
        scores={"accuracy": 1.0},
        advantages=torch.tensor([0.5, 0.5]),
    )


def test_jsonl_appends_flushes_and_has_no_nan(tmp_path):
    file = tmp_path / "deep" / "metrics.jsonl"
    logger = JsonlLogger(file)
    logger.log(1, {"train/loss": 0.5, "train/grad_norm": float("nan")})
    assert json.loads(file.read_text())["train/grad_norm"] is None
    logger.close()
    JsonlLogger(file).log(2, {"train/loss": 0.25})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 0.5), (2, 0.25)]


def test_tensorboard_reads_back(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path)
    logger.log(3, {"rollout/reward": 0.75})
    logger.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward")] == [(3, 0.75)]


def test_rollouts_hold_text_scores_and_tokens_within_the_budget(tmp_path):
    writer = RolloutWriter(tmp_path, rank=1, max_bytes=1000)
    writer.write(4, [experience(), experience()])
    (file,) = tmp_path.iterdir()
    assert file.name == "step_000004.rank1.jsonl"
    row = json.loads(file.read_text().splitlines()[0])
    assert (row["prompt"], row["response"], row["reference"], row["scores"]) == ("2 + 3?", "#### 5", "#### 5", {"accuracy": 1.0})
    assert (row["engine_log_probs"], row["advantages"], row["trainer_log_probs"]) == ([-0.5, -0.25], [0.5, 0.5], None)
    for step in range(5, 20):
        writer.write(step, [experience("x" * 100)])
    kept = sum(f.stat().st_size for f in tmp_path.iterdir())
    assert 0 < kept <= 1000


def test_one_readable_line_per_step_and_silence_off_rank_0():
    stream = io.StringIO()
    metrics = {"rollout/reward": 0.5, "rollout/accuracy": 0.25, "perf/seconds_generate": 1.5, "perf/seconds_step": 2.0}
    console = Console(stream=stream, total_steps=9)
    with console.phase("generate"):
        console.step_line(3, metrics)
    assert stream.getvalue() == "step 3/9  reward 0.500  accuracy 25.0%  2.0 s (generate 1.5)\n"
    quiet = io.StringIO()
    Console(enabled=False, stream=quiet).step_line(3, metrics)
    assert quiet.getvalue() == ""
