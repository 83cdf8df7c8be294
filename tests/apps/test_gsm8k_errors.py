"""What a user can get wrong: one clear line on every rank, exit code 2, before any process talks to another.

Each case runs as rank 1 of 2 without a rank 0: a collective would wait for it until the test's time-out.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from rft_trainer.testing import tiny_model_folder

MAIN = Path(__file__).parents[2] / "apps" / "gsm8k" / "__main__.py"
GOOD_LINE = {"question": "Tom has 2 apples and buys 3. How many has he?", "answer": "2 + 3 = 5\n#### 5"}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def app():
    spec = importlib.util.spec_from_file_location("gsm8k_entry_point", MAIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def run(app, monkeypatch, capsys, tmp_path, model):
    """Runs the app as rank 1 of 2 and returns (exit code, what it wrote to stderr)."""
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    data = tmp_path / "good.jsonl"
    data.write_text(json.dumps(GOOD_LINE) + "\n")
    defaults = {"--pretrain": str(model), "--dataset": str(data), "--output_dir": str(tmp_path / "run")}

    def call(*flags, **changed):
        settings = {**defaults, **{f"--{name}": value for name, value in changed.items()}}
        arguments = ["--fsdp", *(part for pair in settings.items() for part in pair), *flags]
        try:
            code = app.main(arguments)
        except SystemExit as done:  # argument parsers end the process themselves
            code = done.code
        return code, capsys.readouterr().err

    return call


def test_settings_that_do_not_fit_together(run):
    code, err = run(engine_tp_size="4", n_samples_per_prompt="1", rollout_batch_size="3", kl_estimator="k9")
    assert code == 2
    lines = [line for line in err.splitlines() if line.startswith("[rank 1] error:")]
    for words in (
        ("engine_tp_size", "4", "2"),
        ("n_samples_per_prompt", "got 1"),
        ("rollout_batch_size is 3", "multiple of 2"),
        ("k9", "k3"),
    ):
        assert any(all(word in line for word in words) for line in lines), (words, err)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "changed", "words"),
    [
        (("--recipe", "fastest"), {}, ("fastest", "quickstart")),
        ((), {"advantage_estimator": "grpoo"}, ("grpoo", "group_norm")),
        (("--max_stepz", "3"), {}, ("max_stepz",)),
        ((), {"train_batch_size": "7"}, ("train_batch_size is 7", "64 responses")),
        ((), {"pretrain": "/no/such/model"}, ("/no/such/model", "no such folder")),
        ((), {"output_dir": "/proc/no/run"}, ("/proc", "cannot be written")),
        ((), {"dataset": "/no/such/file.jsonl"}, ("/no/such/file.jsonl", "not a file")),
        ((), {"prompt_max_len": "10"}, ("longer than 10 tokens", "good.jsonl:1")),
        ((), {"engine_type": "sglang"}, ("SGLang", "--extra sglang")),
    ],
)
def test_each_mistake_is_named(run, flags, changed, words):
    code, err = run(*flags, **changed)
    assert code == 2
    assert "Traceback" not in err
    for word in words:
        # The parser of flags wraps its box at the width of the terminal.
        assert word in " ".join(err.split()), err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("no rows",)),
        (json.dumps(GOOD_LINE) + '\n{"question": \n', (":2", "not a JSON object")),
        (json.dumps({"question": "2 + 3?"}), (":1", "'answer'", "reference_key")),
        (json.dumps({"question": "2 + 3?", "answer": "#### none"}), (":1", "'answer'", "no answer")),
    ],
)
def test_bad_data_names_line_and_field(run, tmp_path, text, words):
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    code, err = run(dataset=str(file))
    assert code == 2
    for word in words:
        assert word in err, err


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"), ("tokenizer",)),
        (("chat_template.jinja",), ("chat template",)),
        (("model.safetensors",), ("safetensors",)),
        (("config.json",), ("config.json",)),
    ],
)
def test_a_model_folder_that_lacks_a_file(run, tmp_path, missing, words):
    folder = tiny_model_folder(tmp_path / "spoilt")
    for name in missing:
        (folder / name).unlink()
    code, err = run(pretrain=str(folder))
    assert code == 2
    assert "Traceback" not in err
    for word in words:
        assert word in err, err


def test_an_earlier_run_is_not_overwritten_unasked(run, tmp_path):
    folder = tmp_path / "earlier"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    code, err = run(output_dir=str(folder))
    assert (code, (folder / "config.json").read_text()) == (2, "{}")
    assert "already holds a run" in err
    assert "--overwrite" in err


def test_a_dry_run_knows_the_bundled_model(app, model, monkeypatch, capsys):
    monkeypatch.setattr("gsm8k_app.inputs.smollm2_folder", lambda **options: model)
    assert app.main(["--recipe", "quickstart", "--dry_run", "--plan_ranks", "2", "--device", "cpu", "--freeze"]) == 0
    assert "2 ranks: 2 engines of 1 rank;" in capsys.readouterr().out
