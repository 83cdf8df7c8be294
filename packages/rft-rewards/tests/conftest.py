import json
from pathlib import Path

import pytest

from rft_rewards import Grader


def _shared_data(name: str) -> Path:
    for folder in Path(__file__).resolve().parents:
        if (found := folder / "shared" / "data" / name).is_dir():
            return found
    pytest.skip(f"no shared/data/{name} in a folder above the tests")


@pytest.fixture(scope="session")
def gsm8k_answers() -> list[str]:
    """The 8,792 gold texts of GSM8K."""
    folder = _shared_data("gsm8k")
    texts = [(folder / f"{split}.jsonl").read_text(encoding="utf-8") for split in ("train", "test")]
    return [json.loads(line)["answer"] for text in texts for line in text.splitlines()]


@pytest.fixture(scope="session")
def math_golds() -> list[str]:
    """The 500 gold answers of MATH-500."""
    lines = (_shared_data("eval") / "math500.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["answer"] for line in lines]


@pytest.fixture(scope="session")
def grader():
    """A grader with math-verify, shared by the tests."""
    pytest.importorskip("math_verify")
    made = Grader(symbolic="require", workers=2, timeout_seconds=20.0)
    yield made
    made.close()
