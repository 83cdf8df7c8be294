"""Problems from JSONL, parquet or the `datasets` library; whatever is wrong is named with its line and field."""

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft_trainer.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem: its text, the gold answer, the label that chooses the reward recipe, and where it came from."""

    text: str
    reference: str
    label: str
    place: str


def load_problems(
    source: str,
    *,
    input_key: str,
    reference_key: str,
    label_key: str | None,
    default_label: str,
    split: str = "train",
) -> list[Problem]:
    """Every problem of a `.jsonl` file, a `.parquet` file, or a data set that `datasets.load_dataset` knows.

    Raises:
        ConfigurationError: no such file, an empty one, a line that is no JSON object, a field that is missing, empty or no
            text (with line and field), a missing extra, or a data set or split that cannot be loaded.
    """
    rows = list(_rows(source, split))
    if not rows:
        raise ConfigurationError(f"dataset {source!r} is empty: give a file with at least one problem")
    problems = []
    for place, row in rows:
        problems.append(
            Problem(
                text=_field(row, input_key, place, "input_key"),
                reference=_field(row, reference_key, place, "reference_key"),
                label=default_label if label_key is None else _field(row, label_key, place, "label_key"),
                place=place,
            )
        )
    return problems


def _rows(source: str, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    path = Path(source)
    if path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.is_file():
            raise ConfigurationError(f"dataset is {source!r}: no such file")
        yield from _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)
    elif path.exists():
        raise ConfigurationError(f"dataset is {source!r}: give a .jsonl or .parquet file, or the id of a data set")
    else:
        yield from _hub_rows(source, split)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            place = f"{path} line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigurationError(f"{place}: not valid JSON ({error}); write one JSON object per line") from error
            if not isinstance(row, dict):
                raise ConfigurationError(f"{place}: a {type(row).__name__}; write one JSON object per line")
            yield place, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    datasets = _datasets(f"the parquet file {path}")
    yield from _numbered(datasets.Dataset.from_parquet(str(path)), str(path))


def _hub_rows(source: str, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    datasets = _datasets(f"the data set {source!r}")
    # GSM8K has two configurations, of which "main" is the plain one; most data sets have a single one.
    configurations = ("main",) if source.endswith("gsm8k") else (None,)
    try:
        loaded = datasets.load_dataset(source, configurations[0], split=split)
    except Exception as error:  # noqa: BLE001 - the library raises a dozen kinds, all of which mean the same here
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigurationError(
            f"dataset {source!r}, split {split!r}, could not be loaded ({first_line}): check id, split and network, "
            "or give a .jsonl file"
        ) from error
    yield from _numbered(loaded, f"{source} {split}")


def _numbered(rows: Iterable[Mapping[str, Any]], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, row in enumerate(rows, start=1):
        yield f"{name} row {number}", row


def _datasets(wanted: str) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigurationError(
            f"{wanted} needs the extra 'datasets': add `--extra datasets` to `uv run`, or "
            "`pip install 'rft-trainer[datasets]'`, or give a .jsonl file"
        )
    import datasets

    return datasets


def _field(row: Mapping[str, Any], key: str, place: str, setting: str) -> str:
    if key not in row:
        raise ConfigurationError(
            f"{place}: no field {key!r} ({setting}); its fields are {', '.join(map(repr, row))}: correct the data or {setting}"
        )
    value = row[key]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"{place}: field {key!r} ({setting}) is {value!r}; give text")
    return value
