"""Model, tokenizer and problems of a run, read and checked on every rank before any process talks to another."""

from dataclasses import dataclass
from typing import Any

from gsm8k_app.model_cache import smollm2_folder
from gsm8k_app.problems import generate, worked_turns
from gsm8k_app.recipes import GENERATED, SMOLLM2
from gsm8k_app.rewards import LABEL
from rft_engines import EngineConfig
from rft_trainer.config import RFTConfig
from rft_trainer.data import Problem, PromptFormat, PromptRecord, load_problems, render_prompts
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


def _records(config: RFTConfig, tokenizer: Any, dataset: str, split: str) -> list[PromptRecord]:
    if dataset == GENERATED:
        count = GENERATED_TRAIN if split == "train" else GENERATED_TEST
        problems = [
            Problem(text=p["question"], reference=p["answer"], label=LABEL, place=f"generated {split} problem {number}")
            for number, p in enumerate(generate(split, count, GENERATOR_SEED), start=1)  # type: ignore[arg-type]
        ]
    else:
        problems = load_problems(
            dataset,
            input_key=config.input_key,
            reference_key=config.reference_key,
            label_key=config.label_key,
            default_label=LABEL,
            split=config.dataset_split if split == "train" else config.eval_split,
        )
    return render_prompts(problems, tokenizer, prompt_format(config), max_length=config.prompt_max_len)


def prompt_format(config: RFTConfig) -> PromptFormat:
    """The user's prompts, or for generated problems the worked turns that show the form of an answer."""
    turns = tuple(worked_turns()) if config.dataset == GENERATED else ()
    return PromptFormat(
        system_prompt=config.system_prompt, input_template=config.input_template, worked_turns=turns
    )
