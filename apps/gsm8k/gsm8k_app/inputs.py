"""Model, tokenizer and problems of a run, read and checked on every rank before any process talks to another."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gsm8k_app.model_cache import smollm2_folder
from gsm8k_app.problems import SYSTEM_PROMPT, generate, worked_turns
from gsm8k_app.recipes import GENERATED, SMOLLM2
from gsm8k_app.rewards import LABEL, LABELS
from rft_engines import EngineConfig
from rft_rewards import extract_gsm8k
from rft_trainer.config import RFTConfig
from rft_trainer.data import (
    BlendedDataset,
    DataSource,
    EncodedPrompt,
    PromptDataset,
    PromptRecord,
    RecordFields,
    load_source,
    parse_sources,
)
from rft_trainer.errors import ConfigurationError
from rft_trainer.models import checkpoint_folder, load_tokenizer
from rft_trainer.roles import engine_config

Split = Literal["train", "test"]
COUNTS: dict[Split, int] = {"train": 2048, "test": 512}
# Problems are the same in every run; the run's seed orders them.
GENERATOR_SEED = 0
_CALCULATOR = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that is read from disk."""

    model_folder: str
    tokenizer: Any
    train: Sequence[EncodedPrompt]
    held_out: Mapping[str, Sequence[EncodedPrompt]]
    engine: EngineConfig


def prepare_inputs(config: RFTConfig) -> Inputs:
    """Read model folder, tokenizer and problems.

    Raises:
        ConfigurationError: whatever is missing or malformed, with its place and the remedy.
    """
    config = with_model_folder(config)
    assert config.pretrain is not None
    folder = checkpoint_folder(config.pretrain)
    tokenizer = load_tokenizer(folder)

    blend = parse_sources(config.blend) or [DataSource(source=str(config.dataset))]
    sets = {source.title: _prompts(config, source, "train", tokenizer) for source in blend}
    return Inputs(
        model_folder=folder,
        tokenizer=tokenizer,
        train=BlendedDataset(sets, [source.weight for source in blend]) if config.blend else next(iter(sets.values())),
        held_out=held_out_sets(config, tokenizer),
        engine=engine_config(config, folder),
    )


def held_out_sets(config: RFTConfig, tokenizer: Any) -> dict[str, Sequence[EncodedPrompt]]:
    """The sets that are evaluated, by name; that of `eval_dataset` has none.

    Raises:
        ConfigurationError: one cannot be read.
    """
    sets: dict[str, Sequence[EncodedPrompt]] = {
        source.title: _prompts(config, source, "test", tokenizer) for source in parse_sources(config.eval_sets)
    }
    if config.eval_dataset is not None:
        sets[""] = _prompts(config, DataSource(source=config.eval_dataset), "test", tokenizer)
    return sets


def _prompts(config: RFTConfig, source: DataSource, split: Split, tokenizer: Any) -> PromptDataset:
    records = records_of(config, source, split, parse=gold_text if config.partial_credit else gold_answer)
    if split == "train" and config.reference_max_len is not None:
        worked = records_of(config, source, split, parse=worked_answer)
        records = _with_short_answers(records, worked, tokenizer, config.reference_max_len)
    return PromptDataset(
        records[: config.eval_limit] if split == "test" else records,
        tokenizer,
        max_prompt_tokens=config.prompt_max_len,
    )


def _with_short_answers(
    records: Sequence[PromptRecord], worked: Sequence[PromptRecord], tokenizer: Any, limit: int
) -> list[PromptRecord]:
    """The records whose worked gold answer has at most `limit` tokens."""
    lengths = [len(tokenizer(record.reference or "", add_special_tokens=False)["input_ids"]) for record in worked]
    kept = [record for record, length in zip(records, lengths, strict=True) if length <= limit]
    if not kept:
        raise ConfigurationError(
            f"reference_max_len is {limit}, and the shortest of {len(lengths)} gold answers has {min(lengths)} tokens: "
            "raise it, or leave it out"
        )
    return kept


def with_model_folder(config: RFTConfig) -> RFTConfig:
    """The configuration with the folder of the bundled model in the place of its name.

    Raises:
        ConfigurationError: the bundled model's package is missing.
    """
    if config.pretrain != SMOLLM2:
        return config
    return replace(config, pretrain=str(smollm2_folder(announce=print)))


def records_of(
    config: RFTConfig, source: DataSource, split: Split, *, parse: Callable[[str], str | None]
) -> list[PromptRecord]:
    """The rows of a set, each with the reward recipe's label; `parse` makes the reference from the gold answer.

    Raises:
        ConfigurationError: a row is malformed, or has a label that this app does not know.
    """
    options: dict[str, Any] = {
        "system_prompt": config.system_prompt,
        "input_template": config.input_template,
        "parse_reference": parse,
    }
    if source.source == GENERATED:
        records = _generated(config, source, split, options)
    else:
        records = load_source(
            source,
            split=config.dataset_split if split == "train" else config.eval_split,
            input_key=config.input_key,
            reference_key=config.reference_key,
            label_key=config.label_key,
            **options,
        )
        if config.label_key is None and source.label is None:
            records = [replace(record, label=LABEL) for record in records]
    _check_labels(records)
    return records


def _generated(config: RFTConfig, source: DataSource, split: Split, options: dict[str, Any]) -> list[PromptRecord]:
    """Problems in GSM8K's own fields, whatever those of other sets are called."""
    for name in ("split", "input_key", "reference_key"):
        if getattr(source, name) is not None:
            raise ConfigurationError(
                f"data set {GENERATED!r}: {name}={getattr(source, name)} belongs to files and hub data; leave it out"
            )
    if config.system_prompt is None:
        options = {**options, "system_prompt": SYSTEM_PROMPT}
    fields = RecordFields(**options, example_turns=tuple(worked_turns()))
    rows = generate(split, min(COUNTS[split], source.limit or COUNTS[split]), GENERATOR_SEED)
    records = [fields.record(row, f"generated {split}:{number}") for number, row in enumerate(rows, start=1)]
    return [replace(record, label=source.label or LABEL) for record in records]


def _check_labels(records: Sequence[PromptRecord]) -> None:
    for record in records:
        if record.label not in LABELS:
            known = ", ".join(map(repr, LABELS))
            raise ConfigurationError(
                f"{record.origin}: label {record.label!r} (label_key, or label= of its data set) has no reward recipe; "
                f"known: {known}"
            )


def worked_answer(text: str) -> str:
    """A gold answer as a person would write it: without GSM8K's calculator marks `<<48/2=24>>`."""
    return _CALCULATOR.sub("", text).strip()


def gold_answer(text: str) -> str | None:
    """The number behind `####`, or a bare answer as it is; None when a marker has no number behind it."""
    return extract_gsm8k(text, "strict") if "####" in text else text.strip() or None


def gold_text(text: str) -> str | None:
    """The whole gold answer, calculations and all, where `gold_answer` finds a number in it."""
    return None if gold_answer(text) is None else text.strip()
