"""One training prompt as read from a data set, and how a row of any source becomes one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from rft_trainer.errors import ConfigurationError

PLACEHOLDER = "{}"


class Message(TypedDict):
    """One chat turn."""

    role: str
    content: Any


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """One prompt with everything that scoring its responses needs.

    Attributes:
        messages: chat turns, the last one to be answered.
        text: the same prompt as plain text, for models without a chat template: the turns without their roles.
        reference: the gold answer as the data set writes it; None where there is none.
        label: selects the reward recipe.
        id: name and place of the row in its source, such as `train.jsonl:17`; equal in every run and folder.
        origin: the same with the whole path, for error messages.
        images: pictures of the prompt in order, as the data set gives them (paths, addresses or bytes).
    """

    messages: tuple[Message, ...]
    text: str
    reference: str | None = None
    label: str = "default"
    id: str
    origin: str
    images: tuple[Any, ...] = ()


class FieldOptions(TypedDict, total=False):
    """The keyword options of every loader; `RecordFields` describes each and holds the defaults."""

    input_key: str
    reference_key: str | None
    label_key: str | None
    images_key: str | None
    system_prompt: str | None
    input_template: str | None
    example_turns: tuple[Message, ...]
    parse_reference: Callable[[str], str | None] | None


@dataclass(frozen=True, kw_only=True)
class RecordFields:
    """Which fields of a row are read, and what is put around the input.

    Attributes:
        input_key: the question, a string, or a list of chat messages.
        reference_key: the gold answer, a string or a number; None reads none.
        label_key: the recipe's label; None labels every row "default".
        images_key: a list of pictures (or one); None reads none.
        system_prompt: the system message; None leaves the matter to the chat template.
        input_template: text with one `{}` where the question goes; needs a string input.
        example_turns: worked chat turns between the system message and the question.
        parse_reference: makes the reference from the gold text; a row for which it gives None is an error.

    Raises:
        ConfigurationError: the template has not exactly one `{}`.
    """

    input_key: str = "question"
    reference_key: str | None = "answer"
    label_key: str | None = None
    images_key: str | None = None
    system_prompt: str | None = None
    input_template: str | None = None
    example_turns: tuple[Message, ...] = ()
    parse_reference: Callable[[str], str | None] | None = None

    def __post_init__(self) -> None:
        if self.input_template is not None and self.input_template.count(PLACEHOLDER) != 1:
            raise ConfigurationError(
                f"input_template is {self.input_template!r}; write exactly one {PLACEHOLDER} where the question goes"
            )

    def record(self, row: object, origin: str) -> PromptRecord:
        """The prompt of one row.

        Raises:
            ConfigurationError: naming `origin` and the field that is missing or of a wrong type.
        """
        if not isinstance(row, Mapping):
            raise ConfigurationError(f"{origin}: expected an object with named fields, got {type(row).__name__}")
        question = _field(row, self.input_key, "input_key", origin)
        turns = self._turns(question, origin)
        return PromptRecord(
            messages=turns,
            text="\n\n".join(str(turn["content"]) for turn in turns),
            reference=self._reference(row, origin),
            label=self._label(row, origin),
            id=Path(origin).name,
            origin=origin,
            images=self._images(row, origin),
        )

    def _turns(self, question: Any, origin: str) -> tuple[Message, ...]:
        if isinstance(question, str):
            if not question.strip():
                raise ConfigurationError(f"{origin}: field {self.input_key!r} is empty")
            content = self.input_template.replace(PLACEHOLDER, question) if self.input_template else question
            asked: tuple[Message, ...] = (Message(role="user", content=content),)
        elif self.input_template is not None:
            raise ConfigurationError(
                f"{origin}: field {self.input_key!r} holds chat messages; input_template needs text: leave it out"
            )
        else:
            asked = _messages(question, self.input_key, origin)
        system: tuple[Message, ...] = ()
        if asked[0]["role"] == "system":
            system, asked = asked[:1], asked[1:]
        elif self.system_prompt is not None:
            system = (Message(role="system", content=self.system_prompt),)
        return (*system, *self.example_turns, *asked)

    def _reference(self, row: Mapping[str, Any], origin: str) -> str | None:
        if self.reference_key is None:
            return None
        gold = _field(row, self.reference_key, "reference_key", origin)
        if isinstance(gold, bool) or not isinstance(gold, str | int | float):
            raise ConfigurationError(
                f"{origin}: field {self.reference_key!r} is {type(gold).__name__}, expected text or a number"
            )
        if self.parse_reference is None:
            return str(gold)
        parsed = self.parse_reference(str(gold))
        if parsed is None:
            raise ConfigurationError(f"{origin}: field {self.reference_key!r} holds no answer: ...{str(gold)[-60:]!r}")
        return parsed

    def _label(self, row: Mapping[str, Any], origin: str) -> str:
        return "default" if self.label_key is None else str(_field(row, self.label_key, "label_key", origin))

    def _images(self, row: Mapping[str, Any], origin: str) -> tuple[Any, ...]:
        if self.images_key is None:
            return ()
        images = _field(row, self.images_key, "images_key", origin)
        return tuple(images) if isinstance(images, list | tuple) else (images,)


def _field(row: Mapping[str, Any], key: str, option: str, origin: str) -> Any:
    if row.get(key) is None:
        raise ConfigurationError(
            f"{origin}: no field {key!r}; the row has {sorted(map(str, row))}; name the right one by {option}"
        )
    return row[key]


def _messages(value: Any, key: str, origin: str) -> tuple[Message, ...]:
    well_formed = isinstance(value, list | tuple) and all(
        isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and "content" in turn for turn in value
    )
    if not well_formed:
        raise ConfigurationError(
            f"{origin}: field {key!r} is neither text nor a list of messages with 'role' and 'content'"
        )
    if not value or value[-1]["role"] != "user":
        raise ConfigurationError(f"{origin}: field {key!r} must end with a message of role 'user'")
    return tuple(Message(role=turn["role"], content=turn["content"]) for turn in value)
