"""Model, tokenizer and problems of a run, read and checked on every rank before any process talks to another."""

from dataclasses import dataclass
from typing import Any

from gsm8k_app.model_cache import smollm2_folder
from gsm8k_app.problems import generate, worked_turns
from gsm8k_app.recipes import GENERATED, SMOLLM2
from gsm8k_app.rewards import LABEL
from rft_engines import EngineConfig
from rft_trainer.config import RFTConfig
from rft_trainer.data import PromptRecord, load_records, render_prompts
from rft_trainer.models import load_tokenizer

GENERATED_TRAIN, GENERATED_TEST = 2048, 512
# Problems are the same in every run; the run's seed orders them.
GENERATOR_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that is read from disk."""

    model_folder: str
    tokenizer: Any
    train: list[PromptRecord]
    held_out: list[PromptRecord]
    engine: EngineConfig


def prepare_inputs(config: RFTConfig) -> Inputs:
    """Read model folder, tokenizer and problems.

    Raises:
        ConfigurationError: whatever is missing or malformed, with its place and the remedy.
    """
    assert config.pretrain is not None
    assert config.dataset is not None
    folder = str(smollm2_folder(announce=print)) if config.pretrain == SMOLLM2 else config.pretrain
    tokenizer = load_tokenizer(folder)
    train = _records(config, tokenizer, config.dataset, "train")
    held_out = [] if config.eval_dataset is None else _records(config, tokenizer, config.eval_dataset, "test")
    return Inputs(
        model_folder=folder,
        tokenizer=tokenizer,
        train=train,
        held_out=held_out[: config.eval_limit],
        engine=_engine(config, folder),
    )
