"""Problems from files: what is wrong is named with line and field."""

import json

import pytest
from rft_trainer.data import PromptFormat, load_problems, render_prompts
from rft_trainer.errors import ConfigurationError
from rft_trainer.testing import byte_tokenizer

KEYS = {"input_key": "question", "reference_key": "answer", "label_key": None, "default_label": "gsm8k"}


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def test_jsonl_fields_labels_and_numbers(tmp_path):
    source = write(tmp_path / "a.jsonl", {"q": "2 + 3?", "a": 5, "kind": "sum"}, "", {"q": "two", "a": "#### 2", "kind": "word"})
    keys = {**KEYS, "input_key": "q", "reference_key": "a", "label_key": "kind"}
    problems = load_problems(source, **keys)
    assert [(p.text, p.reference, p.label) for p in problems] == [("2 + 3?", "5", "sum"), ("two", "#### 2", "word")]
    assert problems[1].place.endswith("a.jsonl line 3")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([{"question": "q", "answer": "a"}, '{"question": '], ("line 2", "not valid JSON")),
        ([["q", "a"]], ("line 1", "list", "JSON object")),
        ([{"question": "q"}], ("line 1", "'answer'", "reference_key")),
        ([{"question": "  ", "answer": "a"}], ("line 1", "'question'", "'  '")),
        ([{"question": None, "answer": "a"}], ("line 1", "'question'", "None")),
        ([""], ("empty",)),
    ],
)
def test_malformed_data_names_line_and_field(tmp_path, lines, words):
    with pytest.raises(ConfigurationError) as caught:
        load_problems(write(tmp_path / "bad.jsonl", *lines), **KEYS)
    for word in words:
        assert word in str(caught.value)


def test_missing_file_and_unknown_kind_of_file(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        load_problems(str(tmp_path / "none.jsonl"), **KEYS)
    with pytest.raises(ConfigurationError, match="jsonl or .parquet"):
        load_problems(write(tmp_path / "data.csv", "q,a"), **KEYS)


def test_parquet_gives_what_jsonl_gives(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(3)]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    plain = load_problems(write(tmp_path / "a.jsonl", *rows), **KEYS)
    parquet = load_problems(str(tmp_path / "a.parquet"), **KEYS)
    assert [(p.text, p.reference) for p in parquet] == [(p.text, p.reference) for p in plain]


def test_prompts_are_the_template_of_the_chat(tmp_path):
    tokenizer = byte_tokenizer()
    problems = load_problems(write(tmp_path / "a.jsonl", {"question": "2 {x}?", "answer": "2"}), **KEYS)
    shape = PromptFormat(system_prompt="Be brief.", input_template="Solve: {}", worked_turns=(("1?", "#### 1"),))
    (record,) = render_prompts(problems, tokenizer, shape, max_length=200)
    assert tokenizer.decode(record.token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSolve: 1?<|im_end|>\n<|im_start|>assistant\n#### 1"
        "<|im_end|>\n<|im_start|>user\nSolve: 2 {x}?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_with_a_beginning_of_sequence_token_gives_exactly_one(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    problems = load_problems(write(tmp_path / "a.jsonl", {"question": "hi", "answer": "2"}), **KEYS)
    (record,) = render_prompts(problems, tokenizer, PromptFormat(), max_length=200)
    assert record.token_ids.count(tokenizer.bos_token_id) == 1


def test_long_prompts_are_listed(tmp_path):
    rows = [{"question": "x" * length, "answer": "1"} for length in (3, 300, 400)]
    problems = load_problems(write(tmp_path / "a.jsonl", *rows), **KEYS)
    with pytest.raises(ConfigurationError, match=r"line 2 \(3\d\d tokens\), .*line 3 \(4\d\d tokens\)"):
        render_prompts(problems, byte_tokenizer(), PromptFormat(), max_length=100)
