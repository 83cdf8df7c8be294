"""Reading prompts from JSONL, parquet and hub data sets; each error names the file, the line and the field."""

import json
from pathlib import Path
from typing import Any, Unpack

from rft_trainer.data.records import FieldOptions, PromptRecord, RecordFields
from rft_trainer.errors import ConfigurationError

EXTRA_HINT = "needs the extra `datasets`, which is not installed; run: pip install 'rft-trainer[datasets]'"
PREFERRED_CONFIGURATIONS = ("main", "default")


def load_records(source: str | Path, *, split: str = "train", **fields: Unpack[FieldOptions]) -> list[PromptRecord]:
    """The prompts of a `.jsonl` or `.parquet` file, else of the hub data set of that id.

    `split` matters to hub data sets alone: a file is one split.

    Raises:
        ConfigurationError: no such file, nothing in it, a malformed row, or the extra is missing.
    """
    suffix = Path(source).suffix
    if suffix in (".jsonl", ".json"):
        return load_jsonl(source, **fields)
    if suffix == ".parquet":
        return load_parquet(source, **fields)
    if Path(source).is_file():
        raise ConfigurationError(f"{source}: unknown kind of file {suffix!r}; give .jsonl or .parquet")
    return load_hub(str(source), split=split, **fields)


def load_jsonl(path: str | Path, **fields: Unpack[FieldOptions]) -> list[PromptRecord]:
    """The prompts of a file with one JSON object a line; blank lines are skipped.

    Raises:
        ConfigurationError: the file is missing, unreadable or empty, or a line is malformed or lacks a field.
    """
    path = Path(path)
    mapping = RecordFields(**fields)
    records = []
    for number, line in enumerate(_read(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        origin = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{origin}: not a JSON object ({error}); the line begins {line[:60]!r}") from error
        records.append(mapping.record(row, origin))
    return _not_empty(records, path)


def load_parquet(path: str | Path, **fields: Unpack[FieldOptions]) -> list[PromptRecord]:
    """The prompts of a parquet file; errors count its rows from 1.

    Raises:
        ConfigurationError: as `load_jsonl`, or the extra `datasets` is missing.
    """
    path = Path(path)
    mapping = RecordFields(**fields)
    if not path.is_file():
        raise _missing(path)
    try:
        from pyarrow import ArrowInvalid  # type: ignore[import-untyped]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigurationError(f"reading {path} {EXTRA_HINT}") from error
    try:
        rows = [row for batch in ParquetFile(path).iter_batches() for row in batch.to_pylist()]
    except ArrowInvalid as error:
        raise ConfigurationError(f"{path} is not a readable parquet file: {error}") from error
    return _not_empty([mapping.record(row, f"{path}:{number}") for number, row in enumerate(rows, start=1)], path)


def load_hub(name: str, *, split: str = "train", **fields: Unpack[FieldOptions]) -> list[PromptRecord]:
    """The prompts of one split of a hub data set, by its id (`openai/gsm8k`) or a local folder in the hub's layout.

    `id:configuration` names a configuration; without one, the only configuration is taken, else "main" or "default".

    Raises:
        ConfigurationError: the data set cannot be loaded, has no such split, or the extra `datasets` is missing.
    """
    mapping = RecordFields(**fields)
    try:
        import datasets
    except ImportError as error:
        raise ConfigurationError(f"the data set {name!r} {EXTRA_HINT}") from error
    name, _, configuration = name.partition(":")
    try:
        table = datasets.load_dataset(name, configuration or _configuration(datasets, name), split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ConfigurationError(
            f"the data set {name!r} (split {split!r}) cannot be loaded: {error}; give a .jsonl or .parquet file, a "
            "local folder, or the id of a data set that this machine can reach"
        ) from error
    rows = enumerate(table, start=1)
    return _not_empty([mapping.record(row, f"{name}:{split}:{number}") for number, row in rows], name)


def _configuration(datasets: Any, name: str) -> str:
    known: list[str] = datasets.get_dataset_config_names(name)
    for choice in PREFERRED_CONFIGURATIONS if len(known) > 1 else known:
        if choice in known:
            return choice
    raise ConfigurationError(f"the data set {name!r} has the configurations {known}; write {name}:CONFIGURATION")


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise _missing(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def _missing(path: Path) -> ConfigurationError:
    return ConfigurationError(f"{path} is not a file; give the path of an existing .jsonl or .parquet file")


def _not_empty(records: list[PromptRecord], source: str | Path) -> list[PromptRecord]:
    if not records:
        raise ConfigurationError(f"{source} holds no rows; give a data set with one prompt at least")
    return records
