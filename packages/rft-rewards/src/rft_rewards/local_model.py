"""Reward models in this process: a sequence classifier, or a causal model asked a question about the response."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rft_rewards.errors import MissingExtraError, RewardModelError
from rft_rewards.judging import JudgePrompt
from rft_rewards.residency import ModelResidency
from rft_rewards.sample import RewardSample
from rft_rewards.score import Score

if TYPE_CHECKING:
    from torch import Tensor


class HFRewardModel:
    """A transformers model as a `RewardModel`.

    The text is always rebuilt and encoded with the reward model's own chat template and tokenizer; ids of the policy
    are never used. The conversation is `metadata["messages"]` where a sample has it, else the prompt as one user
    message; the response is the last assistant message. Without a chat template prompt and response are encoded as a
    pair. Text that spells a special token of the reward model's tokenizer, or one of `policy_marks`, is dropped from
    the contents.

    Without `judge` the model classifies sequences: the score is its logit at the last real token (one label), or the
    probability of `label_index` (several). With `judge` the model is a causal one and the score comes from the
    probabilities of the verdict's first token; nothing is generated.

    Samples are sorted by length and padded on the right in batches of at most `batch_tokens` padded tokens; the order
    of the scores is the order of the samples. Inputs over `max_tokens` lose tokens behind the first one, at the front,
    which is counted as `cut_inputs`.

    Args:
        model: `AutoModelForSequenceClassification` or, with `judge`, `AutoModelForCausalLM`; put in eval mode.
        tokenizer: the one that belongs to `model`.
        name: name of the score.
        judge: the question to ask.
        label_index: which probability counts, for a classifier of several labels.
        max_tokens: longest input; None takes the model's number of positions.
        batch_tokens: most padded tokens in one forward pass.
        policy_marks: texts of the policy's own end and pad marks.
        residency: brings the model to its device for its turn; models that share a `DeviceTurn` are never there
            together. None leaves the model where it is.

    Raises:
        RewardModelError: labels, verdict words or template do not fit the model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "reward_model",
        judge: JudgePrompt | None = None,
        label_index: int | None = None,
        max_tokens: int | None = None,
        batch_tokens: int = 16384,
        policy_marks: Sequence[str] = (),
        residency: ModelResidency | None = None,
    ) -> None:
        self.name = name
        self.model = model.eval()
        self.tokenizer = tokenizer
        self._judge = judge
        self._label_index = label_index
        self._max_tokens = max_tokens or int(getattr(model.config.get_text_config(), "max_position_embeddings", 4096))
        self._batch_tokens = batch_tokens
        special = sorted({*tokenizer.all_special_tokens, *policy_marks} - {""}, key=len, reverse=True)
        self._marks: tuple[str, ...] = tuple(special)
        self._residency = residency
        self._loaded = False
        self._verdicts = self._verdict_ids(judge) if judge is not None else {}
        if judge is None and model.config.num_labels > 1 and label_index is None:
            raise RewardModelError(
                f"{name} has {model.config.num_labels} labels: give label_index, or load it with num_labels=1"
            )

    @classmethod
    def from_pretrained(
        cls, folder: str, *, judge: JudgePrompt | None = None, dtype: str = "auto", **options: Any
    ) -> "HFRewardModel":
        """Load model and tokenizer from `folder` to the CPU; `options` are those of the constructor.

        Raises:
            MissingExtraError: transformers is not installed (extra `model`).
        """
        try:
            from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
        except ImportError as error:
            raise MissingExtraError(
                "HFRewardModel needs torch and transformers, extra 'model': pip install 'rft-rewards[model]'"
            ) from error
        kind = AutoModelForSequenceClassification if judge is None else AutoModelForCausalLM
        model = kind.from_pretrained(folder, dtype=dtype)
        return cls(model, AutoTokenizer.from_pretrained(folder), judge=judge, **options)

    def load(self) -> None:
        """Bring the model to its device; a second call does nothing."""
        if not self._loaded and self._residency is not None:
            self._residency.acquire(self.model)
        self._loaded = True

    def release(self) -> None:
        """Take the model off its device; a second call does nothing."""
        if self._loaded and self._residency is not None:
            self._residency.release(self.model)
        self._loaded = False

    def __call__(self, samples: Sequence[RewardSample]) -> list[Score]:
        """Score `samples`; loads and releases the model itself when the caller did not."""
        if not self._loaded:
            self.load()
            try:
                return self(samples)
            finally:
                self.release()
        encoded = [self._encoded(sample) for sample in samples]
        scores: list[Score] = [Score()] * len(samples)
        for rows in self._batches([len(ids) for ids, _ in encoded]):
            values = self._forward([encoded[row][0] for row in rows])
            for row, value in zip(rows, values, strict=True):
                scores[row] = Score(value, counts={"cut_inputs": int(encoded[row][1])})
        return scores

    def _encoded(self, sample: RewardSample) -> tuple[list[int], bool]:
        """Token ids of the input, and whether it was cut."""
        if self._judge is not None:
            cleaned = RewardSample(
                self._cleaned(sample.response), prompt=self._cleaned(sample.prompt), reference=sample.reference
            )
            ids = self._template_ids(self._judge.messages(cleaned), answer_next=True)
        elif self.tokenizer.chat_template:
            ids = self._template_ids(self._conversation(sample), answer_next=False)
        else:
            ids = list(self.tokenizer(self._cleaned(sample.prompt), self._cleaned(sample.response))["input_ids"])
        if len(ids) <= self._max_tokens:
            return ids, False
        return ids[:1] + ids[len(ids) - self._max_tokens + 1 :], True

    def _conversation(self, sample: RewardSample) -> list[dict[str, str]]:
        given: Sequence[Mapping[str, Any]] = sample.metadata.get("messages") or (
            {"role": "user", "content": sample.prompt},
        )
        turns = [{"role": str(turn["role"]), "content": self._cleaned(str(turn["content"]))} for turn in given]
        return [*turns, {"role": "assistant", "content": self._cleaned(sample.response)}]

    def _template_ids(self, messages: list[dict[str, str]], *, answer_next: bool) -> list[int]:
        if not self.tokenizer.chat_template:
            raise RewardModelError(f"{self.name} has no chat template, which a judge needs: set its chat_template")
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=answer_next, return_dict=True)
        return list(encoded["input_ids"])

    def _cleaned(self, text: str) -> str:
        for mark in self._marks:
            text = text.replace(mark, "")
        return text

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        rows: list[int] = []
        for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
            if rows and (len(rows) + 1) * lengths[rows[0]] > self._batch_tokens:
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        pad = self._pad_id(rows)
        width = max(map(len, rows))
        device = next(self.model.parameters()).device
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = (torch.arange(width, device=device)[None] < lengths[:, None]).long()
        config = self.model.config.get_text_config()
        before, config.pad_token_id = config.pad_token_id, pad  # transformers pools at the last id that is not this one
        try:
            with torch.inference_mode():
                if self._judge is None:
                    return self._classified(self.model(input_ids=ids, attention_mask=mask).logits)
                return self._judged(self.model(input_ids=ids, attention_mask=mask).logits, lengths)
        finally:
            config.pad_token_id = before

    def _pad_id(self, rows: Sequence[Sequence[int]]) -> int:
        """The tokenizer's pad id; another one where the text holds it, as it does when pad and end are the same."""
        used = {token for row in rows for token in row}
        pad: int | None = self.tokenizer.pad_token_id
        if pad is not None and pad not in used:
            return pad
        return next(token for token in range(len(used) + 1) if token not in used)

    def _classified(self, logits: "Tensor") -> list[float]:
        if self._label_index is None:
            return [float(value) for value in logits[:, 0].float()]
        return [float(value) for value in logits.float().softmax(-1)[:, self._label_index]]

    def _judged(self, logits: "Tensor", lengths: "Tensor") -> list[float]:
        """Scores from the logits `[N, T, V]` behind the last real token of each row."""
        import torch

        tokens = torch.tensor(list(self._verdicts), device=logits.device)
        values = torch.tensor(list(self._verdicts.values()), device=logits.device)
        last = logits[torch.arange(len(lengths), device=logits.device), lengths - 1].float()
        return [float(value) for value in last[:, tokens].softmax(-1) @ values]

    def _verdict_ids(self, judge: JudgePrompt) -> dict[int, float]:
        """Token id of each spelling of a verdict that is one token, with its score."""
        found: dict[int, float] = {}
        for word, value in judge.verdicts().items():
            for spelling in (word, f" {word}"):
                ids = self.tokenizer(spelling, add_special_tokens=False)["input_ids"]
                if len(ids) == 1 and ids[0] != self.tokenizer.unk_token_id:
                    found[ids[0]] = value
        if missing := set(judge.verdicts().values()) - set(found.values()):
            raise RewardModelError(
                f"{self.name}: no single token for the verdicts with the scores {sorted(missing)}: choose other words "
                "or a smaller range"
            )
        return found
