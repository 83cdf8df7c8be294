"""From problems to prompt token ids, by the tokenizer's own chat template."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rft_trainer.data.records import Problem
from rft_trainer.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """What stands around a problem.

    system_prompt: system message; None leaves the template's own in place.
    input_template: text with one `{}` for the problem; None is the problem alone.
    worked_turns: (problem, answer) pairs shown as earlier turns of the chat.
    """

    system_prompt: str | None = None
    input_template: str | None = None
    worked_turns: tuple[tuple[str, str], ...] = ()

    def messages(self, problem: str) -> list[dict[str, str]]:
        """The chat up to the model's turn."""
        chat = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        for question, answer in self.worked_turns:
            chat += [{"role": "user", "content": self._framed(question)}, {"role": "assistant", "content": answer}]
        return [*chat, {"role": "user", "content": self._framed(problem)}]

    def _framed(self, problem: str) -> str:
        # Not str.format: problems and templates may hold braces of their own.
        return problem if self.input_template is None else self.input_template.replace("{}", problem)


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """A prompt as the engine sees it (`token_ids`), with what scoring needs."""

    text: str
    token_ids: tuple[int, ...]
    reference: str
    label: str


def render_prompts(
    problems: Sequence[Problem], tokenizer: Any, prompt_format: PromptFormat, *, max_length: int
) -> list[PromptRecord]:
    """Token ids of every problem's prompt; the template writes any beginning-of-sequence token, so there is exactly one.

    Raises:
        ConfigurationError: prompts longer than `max_length` tokens, with their places.
    """
    records = []
    too_long = []
    for problem in problems:
        ids = tokenizer.apply_chat_template(
            prompt_format.messages(problem.text), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if len(ids) > max_length:
            too_long.append(f"{problem.place} ({len(ids)} tokens)")
        records.append(
            PromptRecord(text=problem.text, token_ids=tuple(ids), reference=problem.reference, label=problem.label)
        )
    if too_long:
        shown = ", ".join(too_long[:5]) + (f" and {len(too_long) - 5} more" if len(too_long) > 5 else "")
        raise ConfigurationError(
            f"prompt_max_len is {max_length}, but these prompts are longer: {shown}; raise prompt_max_len or leave them out"
        )
    return records
