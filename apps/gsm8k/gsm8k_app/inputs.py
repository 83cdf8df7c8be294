"""Model, tokenizer and problems of a run, read and checked on every rank before any process talks to another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gsm8k_app.model_cache import smollm2_folder
from gsm8k_app.problems import SYSTEM_PROMPT, generate, worked_turns
from gsm8k_app.recipes import GENERATED, SMOLLM2
from gsm8k_app.rewards import LABEL
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

Split = Literal["train", "test"]
COUNTS: dict[Split, int] = {"train": 2048, "test": 512}
# Problems are the same in every run; the run's seed orders them.
GENERATOR_SEED = 0


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

    def prompts(source: DataSource, split: Split) -> PromptDataset:
        records = records_of(config, source, split, parse=gold_answer)
        return PromptDataset(
            records[: config.eval_limit] if split == "test" else records,
            tokenizer,
            max_prompt_tokens=config.prompt_max_len,
        )

    held_out: dict[str, Sequence[EncodedPrompt]] = {
        source.title: prompts(source, "test") for source in parse_sources(config.eval_sets)
    }
    if config.eval_dataset is not None:
        held_out[""] = prompts(DataSource(source=config.eval_dataset), "test")
    blend = parse_sources(config.blend) or [DataSource(source=str(config.dataset))]
    sets = {source.title: prompts(source, "train") for source in blend}
    return Inputs(
        model_folder=folder,
        tokenizer=tokenizer,
        train=BlendedDataset(sets, [source.weight for source in blend]) if config.blend else next(iter(sets.values())),
        held_out=held_out,
        engine=engine_config(config, folder),
    )


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
        if config.system_prompt is None:
            options["system_prompt"] = SYSTEM_PROMPT
        fields = RecordFields(**options, example_turns=tuple(worked_turns()))
        rows = generate(split, COUNTS[split], GENERATOR_SEED)
        records = [fields.record(row, f"generated {split}:{number}") for number, row in enumerate(rows, start=1)]
    else:
        records = load_source(
            source,
            split=config.dataset_split if split == "train" else config.eval_split,
            input_key=config.input_key,
            reference_key=config.reference_key,
            label_key=config.label_key,
            **options,
        )
    if (config.label_key is None and source.label is None) or source.source == GENERATED:
        records = [replace(record, label=LABEL) for record in records]
    _check_labels(records)
    return records


def _check_labels(records: Sequence[PromptRecord]) -> None:
    for record in records:
        if record.label != LABEL:
            raise ConfigurationError(
                f"{record.origin}: label {record.label!r} (label_key) has no reward recipe; known: {LABEL!r}"
            )


def gold_answer(text: str) -> str | None:
    """The number behind `####`, or a bare answer as it is; None when a marker has no number behind it."""
    return extract_gsm8k(text, "strict") if "####" in text else text.strip() or None


def engine_config(config: RFTConfig, model_folder: str) -> EngineConfig:
    """The rollout engine's part of the configuration."""
    return EngineConfig(
        kind=config.engine_type,
        model_path=model_folder,
        tp_size=config.engine_tp_size,
        max_model_len=config.prompt_max_len + max(config.generate_max_len, config.eval_max_len or 0),
        memory_utilization=config.engine_mem_util,
        enable_sleep=config.enable_engine_sleep,
        # The first weight sync fills the engine before the first generation.
        load_weights=config.engine_type == "hf",
    )
