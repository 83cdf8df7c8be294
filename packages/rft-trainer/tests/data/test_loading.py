"""Loaders: what a row becomes, and that every bad row is named by file, line and field."""

import json

import pytest

from rft_trainer.data import load_hub, load_jsonl, load_parquet, load_records
from rft_trainer.errors import ConfigurationError

ROWS = [
    {"question": "1 + 1?", "answer": "2"},
    {"question": "Where is\nit? {x}", "answer": "#### 1,234", "kind": "hard"},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_becomes_a_record(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    records = load_jsonl(path)
    assert [record.messages for record in records] == [({"role": "user", "content": row["question"]},) for row in ROWS]
    assert [record.reference for record in records] == ["2", "#### 1,234"]
    assert [record.id for record in records] == ["a.jsonl:1", "a.jsonl:2"]
    assert records[1].origin == f"{path}:2"
    assert {record.label for record in records} == {"default"}


def test_system_examples_and_template_surround_the_question(tmp_path):
    examples = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
    (record,) = load_jsonl(
        write(tmp_path / "a.jsonl", ROWS[1:]),
        label_key="kind",
        system_prompt="Solve.",
        input_template="Q: {} (a number)",
        example_turns=examples,
    )
    assert record.messages == (
        {"role": "system", "content": "Solve."},
        *examples,
        {"role": "user", "content": "Q: Where is\nit? {x} (a number)"},
    )
    assert record.text == "Solve.\n\nq\n\na\n\nQ: Where is\nit? {x} (a number)"
    assert record.label == "hard"


def test_messages_keep_their_own_system_turn(tmp_path):
    turns = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    path = write(tmp_path / "a.jsonl", [{"chat": turns, "gold": 0.5, "pictures": "one.png"}])
    (record,) = load_jsonl(path, input_key="chat", reference_key="gold", system_prompt="other", images_key="pictures")
    assert list(record.messages) == turns
    assert record.reference == "0.5"
    assert record.images == ("one.png",)


def test_blank_lines_are_skipped_but_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + json.dumps(ROWS[0]) + "\n\n")
    assert [record.id for record in load_jsonl(path)] == ["a.jsonl:2"]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", {}, r"a\.jsonl holds no rows"),
        (b"\n \n", {}, r"a\.jsonl holds no rows"),
        (b'{"question": "x", "answer": "1"}\n{"question": \n', {}, r"a\.jsonl:2: not a JSON object .*Expecting value"),
        (b'{"question": "\xff", "answer": "1"}', {}, r"a\.jsonl:1: not a JSON object .*utf-8"),
        (b"[1, 2]", {}, r"a\.jsonl:1: expected an object with named fields, got list"),
        (
            b'{"q": "x", "answer": "1"}',
            {},
            r":1: no field 'question'; the row has \['answer', 'q'\].*input_key",
        ),
        (b'{"question": "x"}', {}, r"a\.jsonl:1: no field 'answer'.*reference_key"),
        (b'{"question": "x", "answer": null}', {}, r"a\.jsonl:1: no field 'answer'"),
        (b'{"question": "x", "answer": [1]}', {}, r"a\.jsonl:1: field 'answer' is list"),
        (b'{"question": "x", "answer": true}', {}, r"a\.jsonl:1: field 'answer' is bool"),
        (b'{"question": " ", "answer": "1"}', {}, r"a\.jsonl:1: field 'question' is empty"),
        (b'{"question": 7, "answer": "1"}', {}, r"a\.jsonl:1: field 'question' is neither text nor a list"),
        (b'{"question": [], "answer": "1"}', {}, r"must end with a message of role 'user'"),
        (b'{"question": [{"role": "user"}], "answer": "1"}', {}, r"neither text nor a list of messages"),
        (
            b'{"question": [{"role": "user", "content": "x"}], "answer": "1"}',
            {"input_template": "<{}>"},
            r"a\.jsonl:1: .*input_template needs text",
        ),
        (b'{"question": "x", "answer": "1"}', {"label_key": "kind"}, r"a\.jsonl:1: no field 'kind'.*label_key"),
        (b'{"question": "x", "answer": "1"}', {"images_key": "p"}, r"a\.jsonl:1: no field 'p'.*images_key"),
        (b'{"question": "x", "answer": "1"}', {"input_template": "no place"}, r"write exactly one \{\}"),
        (
            b'{"question": "x", "answer": "no mark"}',
            {"parse_reference": lambda text: None},
            r"a\.jsonl:1: field 'answer' holds no answer: .*no mark",
        ),
    ],
)
def test_bad_input_is_named(tmp_path, content, options, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        load_jsonl(path, **options)


def test_missing_and_unknown_files(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.jsonl is not a file"):
        load_records(tmp_path / "none.jsonl")
    with pytest.raises(ConfigurationError, match=r"none\.parquet is not a file"):
        load_records(tmp_path / "none.parquet")
    (tmp_path / "a.csv").write_text("question,answer")
    with pytest.raises(ConfigurationError, match=r"unknown kind of file '\.csv'"):
        load_records(tmp_path / "a.csv")


def test_parquet_equals_jsonl(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra datasets is not installed")
    from pyarrow import Table

    parquet.write_table(Table.from_pylist(ROWS), tmp_path / "a.parquet")
    from_parquet = load_records(tmp_path / "a.parquet")
    from_jsonl = load_records(write(tmp_path / "a.jsonl", ROWS))
    assert [(r.messages, r.reference) for r in from_parquet] == [(r.messages, r.reference) for r in from_jsonl]
    with pytest.raises(ConfigurationError, match=r"a\.parquet:1: no field 'kind'"):
        load_parquet(tmp_path / "a.parquet", label_key="kind")
    (tmp_path / "broken.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(ConfigurationError, match=r"broken\.parquet is not a readable parquet file"):
        load_parquet(tmp_path / "broken.parquet")


def test_hub_layout_in_a_local_folder(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="the extra datasets is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "train.jsonl", ROWS[:1])
    write(folder / "test.jsonl", ROWS[:1] * 3)
    assert [record.reference for record in load_records(folder)] == ["2"]
    assert len(load_hub(str(folder), split="test")) == 3
    with pytest.raises(ConfigurationError, match=r"split 'dev'.*cannot be loaded"):
        load_hub(str(folder), split="dev")


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"extra `datasets`.*pip install 'rft-trainer\[datasets\]'"):
        load_hub("openai/gsm8k")
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"extra `datasets`.*pip install 'rft-trainer\[datasets\]'"):
        load_parquet(tmp_path / "a.parquet")
