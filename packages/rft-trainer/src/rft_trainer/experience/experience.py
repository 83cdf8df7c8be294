"""What one response teaches: ids as sampled, log-probabilities of every role, reward and advantage, on the CPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass
class Experience:
    """One sampled response [T tokens] to one prompt [P tokens].

    Tensors live on the CPU. `group` numbers the prompt within the step, equal for its n responses. Filled at
    generation: ids, engine log-probabilities, version. Filled by the roles, in this order: `old_log_probs` (actor),
    `ref_log_probs`, `reward` and `scores`, then `advantages`.

    prompt_ids: [P] int64; response_ids: [T] int64; response_mask: [T] bool, tokens that are trained.
    engine_log_probs: [T] fp32, of the distribution sampled from.
    old_log_probs: [T] fp32; None while the first update's own forward stands in for them.
    """

    group: int
    prompt_ids: Tensor
    response_ids: Tensor
    response_mask: Tensor
    engine_log_probs: Tensor
    weights_version: int
    truncated: bool
    prompt: str = ""
    response: str = ""
    reference: str | None = None
    label: str = "default"
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    reward: float = 0.0
    scores: Mapping[str, float] = field(default_factory=dict)
    advantages: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class ExperienceBatch:
    """Experiences as padded tensors on the device: rows [B, L] of prompt and response, columns [B, T] of responses.

    `loss_mask` marks the response tokens that are trained; it may have holes. Optional columns are None when any row
    lacks them.
    """

    input_ids: Tensor
    attention_mask: Tensor
    score_mask: Tensor
    loss_mask: Tensor
    engine_log_probs: Tensor
    advantages: Tensor | None
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None


def collate(experiences: Sequence[Experience], pad_token_id: int, device: torch.device) -> ExperienceBatch:
    """Right-padded batch of at least one experience."""
    rows = [torch.cat([e.prompt_ids, e.response_ids]) for e in experiences]
    marks = [
        torch.cat([torch.zeros(len(e.prompt_ids), dtype=torch.bool), torch.ones(len(e.response_ids), dtype=torch.bool)])
        for e in experiences
    ]
    real = [torch.ones(len(row), dtype=torch.bool) for row in rows]

    def padded(tensors: Sequence[Tensor], value: float = 0) -> Tensor:
        return pad_sequence(list(tensors), batch_first=True, padding_value=value).to(device)

    def optional(name: str) -> Tensor | None:
        columns = [getattr(e, name) for e in experiences]
        return None if any(c is None for c in columns) else padded(columns)

    return ExperienceBatch(
        input_ids=padded(rows, pad_token_id),
        attention_mask=padded(real),
        score_mask=padded(marks),
        loss_mask=padded([e.response_mask for e in experiences]),
        engine_log_probs=padded([e.engine_log_probs for e in experiences]),
        advantages=optional("advantages"),
        old_log_probs=optional("old_log_probs"),
        ref_log_probs=optional("ref_log_probs"),
    )
