"""What one response teaches: ids as sampled, log-probabilities of every role, reward and advantage, on the CPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rft_trainer.models.layout import TokenLayout, padded_layout, shared_prompt_layout
from rft_trainer.models.padding import right_pad


@dataclass
class Experience:
    """One sampled response [T tokens] to one prompt [P tokens].

    Tensors live on the CPU. `group` is the number of the prompt in its data set, equal for its n responses. Filled at
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
    prompt_id: str = ""
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
    """Experiences as tensors on the device: the rows that the model sees, and columns [B, T] of the responses.

    `loss_mask` marks the response tokens that are trained; it may have holes. Optional columns are None when any
    experience lacks them.
    """

    layout: TokenLayout
    loss_mask: Tensor
    engine_log_probs: Tensor
    advantages: Tensor | None
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Collator:
    """Makes batches for one model.

    share_prompts: responses to one prompt that stand side by side share its tokens (`shared_prompt_layout`).
    """

    pad_token_id: int
    device: torch.device
    share_prompts: bool = False

    def __call__(self, experiences: Sequence[Experience]) -> ExperienceBatch:
        """A batch of at least one experience."""
        arrange = shared_prompt_layout if self.share_prompts else padded_layout
        layout = arrange([e.prompt_ids for e in experiences], [e.response_ids for e in experiences], self.pad_token_id)

        def columns(name: str) -> Tensor | None:
            tensors = [getattr(e, name) for e in experiences]
            if any(t is None for t in tensors):
                return None
            return right_pad(tensors, 0)[0].to(self.device)

        loss_mask, engine = columns("response_mask"), columns("engine_log_probs")
        assert loss_mask is not None
        assert engine is not None
        return ExperienceBatch(
            layout=layout.to(self.device),
            loss_mask=loss_mask,
            engine_log_probs=engine,
            advantages=columns("advantages"),
            old_log_probs=columns("old_log_probs"),
            ref_log_probs=columns("ref_log_probs"),
        )
