"""Gold answers as token ids: what a supervised step imitates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rft_trainer.data.prompts import EncodedPrompt
from rft_trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A prompt and the answer to imitate.

    Attributes:
        prompt_ids: `[P]`, those that the engine gets.
        response_ids: `[T]`, the answer and the token that ends a turn.
        id: of the prompt's record.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    id: str


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """The demonstrations of a data set, and how many were too long to be one."""

    examples: tuple[Demonstration, ...]
    left_out: int


def encode_demonstrations(
    prompts: Sequence[EncodedPrompt],
    answers: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_answer_tokens: int,
) -> Demonstrations:
    """Answers behind their prompts, each closed by the end token; longer ones than a rollout may be are left out.

    An answer is encoded by itself, because a rollout continues the prompt's own ids.

    Args:
        prompts: of the training set.
        answers: as many texts.
        tokenizer: of the policy.
        max_answer_tokens: longest answer, its end token included.

    Raises:
        ConfigurationError: prompts and answers differ in number, an answer is empty, the tokenizer has no end token, or
            no answer is short enough.
    """
    if len(prompts) != len(answers):
        raise ConfigurationError(f"{len(prompts)} prompts and {len(answers)} answers: give one answer to each prompt")
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no end token, so no answer would ever end; set eos_token"
        )
    empty = [prompt.record.origin for prompt, answer in zip(prompts, answers, strict=True) if not answer.strip()]
    if empty:
        raise ConfigurationError(f"{len(empty)} answers are empty, the first at {empty[0]}: nothing to imitate there")
    end = int(tokenizer.eos_token_id)
    encoded = [
        Demonstration(
            prompt_ids=prompt.token_ids,
            response_ids=(*tokenizer(answer, add_special_tokens=False)["input_ids"], end),
            id=prompt.record.id,
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    fitting = tuple(example for example in encoded if len(example.response_ids) <= max_answer_tokens)
    if not fitting:
        shortest = min((len(example.response_ids) for example in encoded), default=0)
        raise ConfigurationError(
            f"none of {len(encoded)} answers fits into generate_max_len {max_answer_tokens}; the shortest has "
            f"{shortest} tokens: raise generate_max_len"
        )
    return Demonstrations(examples=fitting, left_out=len(encoded) - len(fitting))
