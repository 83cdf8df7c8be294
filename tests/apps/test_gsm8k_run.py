"""`torchrun apps/gsm8k` from start to end with a tiny model, both strategies, two gloo ranks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rft_trainer.testing import tiny_model_folder

ROOT = Path(__file__).parents[2]
SIZES = ("--generate_max_len", "8", "--rollout_batch_size", "4", "--n_samples_per_prompt", "4", "--max_steps", "2")
LEARNING = ("--actor_learning_rate", "1e-3", "--init_kl_coef", "0.01", "--micro_train_batch_size", "4")

pytestmark = pytest.mark.timeout(600)


def torchrun(*flags, ranks=2):
    """Start the app as a user would; (exit code, stdout, stderr)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run(
        [*launcher, str(ROOT / "apps" / "gsm8k"), *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Answers that a random byte model gives now and then: any text with a digit behind the marks is half of them."""
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def boxed(tmp_path_factory):
    """A set of another kind: other fields, and answers in a box."""
    file = tmp_path_factory.mktemp("data") / "boxed.jsonl"
    rows = [{"problem": f"half of {i}?", "solution": f"\\frac{{{i}}}{{2}}"} for i in range(1, 6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")


def blend_flags(boxed):
    second = f"{boxed},name=boxed,weight=1,label=math,input_key=problem,reference_key=solution"
    return ("--blend", "generated,weight=3,limit=40", second, "--eval_dataset", "generated", "--eval_limit", "6")


@pytest.fixture(scope="module")
def blended(boxed, model, tmp_path_factory):
    """The app on a blend of generated problems and a second set, with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("runs") / "blended"
    flags = ("--fsdp", "--share_prompts", "--pretrain", str(model), *blend_flags(boxed), *SIZES, *LEARNING)
    code, out, err = torchrun(*flags, "--save_steps", "1", "--output_dir", str(folder))
    assert code == 0, err[-3000:]
    return folder, out


def metric_rows(folder):
    """By step, without evaluations and the clock's numbers."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("perf/", "memory/", "sync/gigabytes")
    return {
        row["step"]: {name: value for name, value in row.items() if not name.startswith(timed)}
        for row in rows
        if "rollout/reward" in row
    }


def rollout_rows(folder, step):
    files = sorted((folder / "rollouts").glob(f"*-{step:06d}.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_blend_draws_by_weight_and_scores_each_set_by_its_own_recipe(blended):
    folder, out = blended
    for step in (1, 2):
        rows = rollout_rows(folder, step)
        assert sorted(row["label"] for row in rows) == 12 * ["gsm8k"] + 4 * ["math"]  # three prompts and one
        for row in rows:
            recipe = {"gsm8k": {"accuracy", "accuracy_any_form"}, "math": {"accuracy"}}[row["label"]]
            assert set(row["scores"]) == recipe
        assert all(row["reference"].startswith("\\frac{") for row in rows if row["label"] == "math")
        logged = metric_rows(folder)[step]
        for label in ("gsm8k", "math"):
            rewards = [row["reward"] for row in rows if row["label"] == label]
            assert logged[f"rollout/label/{label}/reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert "accuracy:" in out
    assert "step 2/2" in out


def test_a_resumed_blend_is_the_unbroken_one(blended, model, boxed, tmp_path):
    folder, _ = blended
    saved = str(folder / "checkpoints" / "step_000001")
    flags = ("--config", str(folder / "config.json"), "--resume_from", saved, "--output_dir", str(tmp_path / "resumed"))
    code, _, err = torchrun(*flags)
    assert code == 0, err[-3000:]
    assert metric_rows(tmp_path / "resumed") == {2: metric_rows(folder)[2]}
    assert rollout_rows(tmp_path / "resumed", 2) == rollout_rows(folder, 2)
    last = "checkpoints/step_000002/manifest.json"
    manifests = [json.loads((run / last).read_text()) for run in (folder, tmp_path / "resumed")]
    assert manifests[0]["trainer"]["sampler"] == manifests[1]["trainer"]["sampler"]
    shards = [{n: f for n, f in m["files"].items() if n.endswith(".distcp")} for m in manifests]
    assert shards[0] == shards[1]
    assert shards[0]


def command(*arguments):
    """A command in one process, without torchrun; (exit code, stdout, stderr)."""
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_commands_of_the_app_know_its_names(blended, tmp_path):
    folder, _ = blended
    checkpoint = ("--config", folder / "config.json", "--resume_from", folder / "checkpoints" / "step_000002")
    code, out, err = command(ROOT / "apps" / "gsm8k", "evaluate", *checkpoint, "--output_dir", tmp_path)
    assert code == 0, err[-3000:]
    found = json.loads((tmp_path / "evaluate" / "metrics.json").read_text())
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (last,) = [row for row in logged if row["step"] == 2 and "eval/accuracy" in row]
    assert (found["eval/items"], found["step"]) == (6, 2)
    assert {n: found[n] for n in last if n.startswith("eval/") and "/counts/" not in n} == {
        n: value for n, value in last.items() if n.startswith("eval/") and "/counts/" not in n
    }
    assert "accuracy_boxed" in out
    # The library's own command says what it does not know.
    code, _, err = command("-m", "rft_trainer.evaluate", *checkpoint, "--output_dir", tmp_path / "other")
    assert code == 2
    assert "the data set 'generated' (split 'test') cannot be loaded" in err
    assert "give a .jsonl or .parquet file" in err


WARM = ("--warm_start_steps", "3", "--warm_start_batch_size", "4", "--warm_start_learning_rate", "1e-3")


@pytest.mark.parametrize("stage", [pytest.param("2", marks=pytest.mark.slow), "3"])
def test_the_whole_path_under_zero(stage, problems, model, tmp_path):
    folder = tmp_path / "run"
    data = ("--pretrain", str(model), "--dataset", str(problems), "--eval_dataset", str(problems))
    code, out, err = torchrun("--zero_stage", stage, *WARM, *data, *SIZES, *LEARNING, "--output_dir", str(folder))
    assert code == 0, err[-3000:]
    # the divergence of 0 in the first step is from the warm-started model
    assert_whole(folder, model, items=10)
    assert_exported(folder / "warm_start", model)
    record = json.loads((folder / "warm_start.json").read_text())
    assert (record["steps"], record["answers"], record["ranks"]) == (3, 4 + 4 + 2, 2)
    forecast, _, after = out.partition("warm start: ")
    assert "in warm_start" in forecast  # said before anything is loaded
    assert "3 steps on" in after
    assert "accuracy:" in out
    assert "step 2/2" in out


def test_the_whole_path_under_fsdp2(blended, model):
    assert_whole(blended[0], model, items=6)
    assert not (blended[0] / "warm_start").exists()


def assert_whole(folder, model, *, items):
    """Versions, gap, counts, evaluation, checkpoint, logs and export of a run of two steps."""
    steps = metric_rows(folder)
    assert list(steps) == [1, 2]
    for step, row in steps.items():
        # the rollout of step k was made with version k; the sync after its update made version k + 1
        assert (row["rollout/weights_version"], row["sync/version"]) == (step, step + 1)
        assert row["rollout/weight_lag"] == 0
        assert row["train/gap/gap"] < 1e-4
        assert row["train/skipped_updates"] == 0
        assert row["rollout/counts/samples"] == 16
        assert row["rollout/counts/accuracy/missing_answer"] <= 16
        assert row["train/kl"] == pytest.approx(0, abs=1e-6) if step == 1 else row["train/kl"] >= 0
    parts = [file.read_text().splitlines() for file in folder.glob("evaluation/eval_000000*")]
    evaluated = [json.loads(line) for part in parts for line in part]
    assert sorted(row["item"] for row in evaluated) == list(range(items))
    assert (folder / "checkpoints" / "latest").read_text() == "step_000002"
    assert list(folder.glob("tensorboard/events*"))
    assert_exported(folder / "model", model)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [("--fsdp",), ("--zero_stage", "2"), ("--zero_stage", "3")])
def test_a_control_from_the_warm_start_of_another_run(strategy, problems, model, tmp_path):
    """The warm start of one run is the model of the next, which trains further for seconds and is evaluated."""
    data = (*strategy, "--dataset", str(problems), "--eval_dataset", str(problems), "--generate_max_len", "8")
    sampled = ("--eval_samples", "8", "--eval_temperature", "1", "--eval_pass_at", "8", "--eval_greedy")
    first, second = tmp_path / "first", tmp_path / "second"
    supervised = ("--warm_start_batch_size", "4", "--max_steps", "0")
    flags = (*data, *supervised, *sampled, "--eval_symbolic")
    code, out, err = torchrun(*flags, "--pretrain", str(model), "--warm_start_epochs", "1", "--output_dir", str(first))
    assert code == 0, err[-3000:]
    flags += ("--pretrain", str(first / "warm_start"), "--warm_start_seconds", "2", "--output_dir", str(second))
    code, out, err = torchrun(*flags)
    assert code == 0, err[-3000:]
    record = json.loads((second / "warm_start.json").read_text())
    assert f"warm start: {record['steps']} steps" in out
    assert record["budget_seconds"] == 2.0
    assert record["model"] == str(first / "warm_start")
    (row,) = map(json.loads, (second / "metrics.jsonl").read_text().splitlines())
    assert {"eval/greedy/accuracy", "eval/accuracy_pass_at_8", "eval/accuracy_symbolic"} <= set(row)
    assert not (second / "model").exists()
    assert not (second / "checkpoints").exists()
    summary = json.loads((second / "summary.json").read_text())
    assert summary["ranks"] == 2
    assert summary["versions"]["torch"] == torch.__version__.partition("+")[0]
    # a second start finds the finished warm start and does not repeat it
    before = (first / "warm_start.json").stat().st_mtime_ns
    code, out, err = torchrun(
        *data, *supervised, *sampled, "--pretrain", str(model), "--warm_start_epochs", "1", "--resume", "auto",
        "--output_dir", str(first),
    )  # fmt: skip
    assert code == 0, err[-3000:]
    assert (first / "warm_start.json").stat().st_mtime_ns == before


def assert_exported(exported, original):
    """transformers loads the folder; weights are tied as before and have the original's names and shapes."""
    network = AutoModelForCausalLM.from_pretrained(exported)
    before = AutoModelForCausalLM.from_pretrained(original)
    assert network.lm_head.weight is network.model.embed_tokens.weight
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in before.state_dict().items()}
    assert (
        AutoTokenizer.from_pretrained(exported).chat_template == AutoTokenizer.from_pretrained(original).chat_template
    )
    assert all(torch.isfinite(tensor).all() for tensor in network.state_dict().values())


def test_a_mistake_under_torchrun_ends_the_job_and_leaves_nothing(model, tmp_path):
    code, _, err = torchrun(
        "--fsdp", "--pretrain", str(model), "--dataset", "none.jsonl", "--output_dir", str(tmp_path)
    )
    assert code != 0
    # Every rank finds it; torchrun may end the slower ones before they have said so.
    assert re.search(r"\[rank [01]\] error: none.jsonl is not a file", err), err
    assert not list(tmp_path.iterdir())
