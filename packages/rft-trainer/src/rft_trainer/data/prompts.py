"""Prompts as token ids: the chat template applied once, the length limit kept, one BOS token at most in front."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from rft_trainer.data.records import PromptRecord
from rft_trainer.errors import ConfigurationError

if TYPE_CHECKING:  # transformers is imported by whoever makes the tokenizer, not by this module
    from transformers import PreTrainedTokenizerBase

TooLong = Literal["error", "drop"]
LISTED_ORIGINS = 10


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A record with the token ids that engine and trainer both use.

    Attributes:
        record: the row it was made from.
        token_ids: `[P]`, without padding.
        text: `token_ids` as text, special tokens included, for rollout files.
    """

    record: PromptRecord
    token_ids: tuple[int, ...]
    text: str


class PromptDataset(Sequence[EncodedPrompt]):
    """The prompts of a data set, encoded at construction so that every bad one is reported before training.

    Args:
        records: what a loader returned.
        tokenizer: of the policy.
        max_prompt_tokens: longest prompt that is allowed.
        too_long: "error" lists the rows that are longer; "drop" leaves them out and counts them in `dropped`.
        apply_chat_template: False sends the plain text, with the special tokens that the tokenizer adds by itself.

    Raises:
        ConfigurationError: the tokenizer has no chat template though one is to be applied, the template refuses the
            messages, a prompt is too long, or none is left.
    """

    def __init__(
        self,
        records: Sequence[PromptRecord],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        max_prompt_tokens: int,
        too_long: TooLong = "error",
        apply_chat_template: bool = True,
    ) -> None:
        if max_prompt_tokens < 1:
            raise ConfigurationError(f"max_prompt_tokens is {max_prompt_tokens}; give 1 or more")
        if too_long not in ("error", "drop"):
            raise ConfigurationError(f"too_long is {too_long!r}; choose 'error' or 'drop'")
        if apply_chat_template and not tokenizer.chat_template:
            raise ConfigurationError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; use the folder of a chat model, "
                "add chat_template.jinja to it, or switch the chat template off to send plain text"
            )
        encoded = [_encode(record, tokenizer, apply_chat_template) for record in records]
        fitting = [prompt for prompt in encoded if len(prompt.token_ids) <= max_prompt_tokens]
        self.dropped = len(encoded) - len(fitting)
        if self.dropped and (too_long == "error" or not fitting):
            raise ConfigurationError(_length_report(encoded, max_prompt_tokens))
        if not fitting:
            raise ConfigurationError("there are no prompts; give one record at least")
        self._prompts = fitting

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> EncodedPrompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[EncodedPrompt]: ...

    def __getitem__(self, index: int | slice) -> EncodedPrompt | list[EncodedPrompt]:
        return self._prompts[index]


def _encode(record: PromptRecord, tokenizer: "PreTrainedTokenizerBase", apply_chat_template: bool) -> EncodedPrompt:
    if apply_chat_template:
        # Jinja's own error class and whatever a template raises: the row's origin is all that can be added.
        try:
            messages: list[dict[str, Any]] = [{**message} for message in record.messages]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise ConfigurationError(f"{record.origin}: the chat template refuses the prompt: {error}") from error
        # The template writes every special token itself; adding them again would double the BOS token.
        ids = list(tokenizer(str(text), add_special_tokens=False)["input_ids"])
    else:
        ids = list(tokenizer(record.text)["input_ids"])
        if ids and ids[-1] == tokenizer.eos_token_id and not record.text.endswith(str(tokenizer.eos_token)):
            ids = ids[:-1]  # some tokenizers close every text; a prompt is to be continued
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        ids = ids[1:]
    return EncodedPrompt(record=record, token_ids=tuple(ids), text=str(tokenizer.decode(ids)))


def _length_report(encoded: Sequence[EncodedPrompt], limit: int) -> str:
    long = [prompt for prompt in encoded if len(prompt.token_ids) > limit]
    listed = ", ".join(f"{prompt.record.origin} ({len(prompt.token_ids)})" for prompt in long[:LISTED_ORIGINS])
    more = f" and {len(long) - LISTED_ORIGINS} more" if len(long) > LISTED_ORIGINS else ""
    longest = max(len(prompt.token_ids) for prompt in long)
    return (
        f"{len(long)} of {len(encoded)} prompts are longer than {limit} tokens: {listed}{more}; raise "
        f"max_prompt_tokens to {longest}, or drop the long prompts"
    )
