"""A data set as one setting: where it is, what it is called, which fields it has, how often it is drawn from."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Self, Unpack

from rft_trainer.data.loading import load_records
from rft_trainer.data.records import FieldOptions, PromptRecord
from rft_trainer.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One data set, written `SOURCE,weight=0.5,label=math`.

    Attributes:
        source: `.jsonl` or `.parquet` file, or hub id.
        name: in metrics and file names; None takes the file's.
        weight: of this set in a blend, above 0.
        label: of the reward recipe for all its rows; None: the rows' own (`label_key`), or the app's.
        split: of a hub data set; None: the run's.
        input_key: field of the problem; None: the run's.
        reference_key: field of the gold answer; None: the run's.
        limit: rows that are used, from the first; None: all.
    """

    source: str
    name: str | None = None
    weight: float = 1.0
    label: str | None = None
    split: str | None = None
    input_key: str | None = None
    reference_key: str | None = None
    limit: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """The data set of a setting.

        Raises:
            ConfigurationError: no source, an unknown field, or a number out of range.
        """
        source, *parts = text.split(",")
        known = [item.name for item in fields(cls) if item.name != "source"]
        values: dict[str, Any] = {}
        for part in parts:
            key, equals, value = part.partition("=")
            if key.strip() not in known or not equals or not value:
                close = get_close_matches(key.strip(), known, 1)
                meant = f"did you mean {close[0]}=...?" if close else f"known are {', '.join(known)}"
                raise ConfigurationError(f"data set {text!r}: {part!r} is no field=value of a data set; {meant}")
            values[key.strip()] = value
        if not source.strip():
            raise ConfigurationError(f"data set {text!r}: begin with the file or hub id")
        return cls(source=source.strip(), **_numbers(values, text))

    @property
    def title(self) -> str:
        """Its name, or that of its file."""
        return self.name or self.source.rstrip("/").rpartition("/")[2].partition(".")[0]


def parse_sources(texts: tuple[str, ...]) -> list[DataSource]:
    """Several data sets, with different names.

    Raises:
        ConfigurationError: one that cannot be read, or two of one name.
    """
    sources = [DataSource.parse(text) for text in texts]
    titles = [source.title for source in sources]
    doubled = sorted({title for title in titles if titles.count(title) > 1})
    if doubled:
        raise ConfigurationError(f"several data sets are called {', '.join(doubled)}: give each a name=... of its own")
    return sources


def load_source(source: DataSource, *, split: str, **options: Unpack[FieldOptions]) -> list[PromptRecord]:
    """The records of one set; what it says of split, fields, label and limit wins over `split` and `options`.

    Raises:
        ConfigurationError: as `load_records`.
    """
    if source.input_key is not None:
        options["input_key"] = source.input_key
    if source.reference_key is not None:
        options["reference_key"] = source.reference_key
    if source.label is not None:
        options["label_key"] = None
    records = load_records(source.source, split=source.split or split, **options)[: source.limit]
    return records if source.label is None else [replace(record, label=source.label) for record in records]


def _numbers(values: Mapping[str, Any], text: str) -> dict[str, Any]:
    result = dict(values)
    try:
        if "weight" in values:
            result["weight"] = float(values["weight"])
        if "limit" in values:
            result["limit"] = int(values["limit"])
    except ValueError as error:
        raise ConfigurationError(f"data set {text!r}: {error}") from error
    if not 0 < result.get("weight", 1.0) < float("inf") or result.get("limit", 1) < 1:
        raise ConfigurationError(f"data set {text!r}: weight must be above 0 and limit 1 or more")
    return result
