"""What one response teaches: ids as sampled, log-probabilities of every role, reward and advantage, on the CPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rft_rewards import RewardSample
from rft_trainer.models.layout import TokenLayout, packed_layout, padded_layout, shared_prompt_layout, to_device
from rft_trainer.models.padding import right_pad


@dataclass
class Experience:
    """One sampled response [T tokens] to one prompt [P tokens].

    Tensors live on the CPU until `to`. `group` is the number of the prompt in its data set, equal for its n responses.
    Filled at generation: ids, engine log-probabilities, version. Then, in this order: `score`, `scores` and
    `step_rewards` by the reward functions; the columns of the roles (actor, reference, critic, teacher); `reward`,
    `advantages`, `returns`.

    prompt_ids: [P] int64; response_ids: [T] int64; response_mask: [T] bool, tokens that are trained.
    engine_log_probs: [T] fp32, of the distribution sampled from.
    weights_version: of the oldest token; token_versions: [T] int64, of each.
    old_log_probs: [T] fp32; None while the first update's own forward stands in for them.
    ref_log_probs, teacher_log_probs, values, advantages, returns: [T] fp32; None where no role gives them.
    score: what the reward functions gave; reward: the score after penalties, normalisation and clip.
    step_rewards: (column of the response, reward) of each step that a reward function scored.
    update_log_probs, update_entropies: [T] fp32, of the last forward of the update, for rollout files.
    expert_counts: [E] how often each expert was chosen for a token of the response; None unless they are balanced.
    """

    group: int
    prompt_ids: Tensor
    response_ids: Tensor
    response_mask: Tensor
    engine_log_probs: Tensor
    weights_version: int
    truncated: bool
    token_versions: Tensor | None = None
    prompt_id: str = ""
    prompt: str = ""
    response: str = ""
    reference: str | None = None
    label: str = "default"
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    values: Tensor | None = None
    expert_counts: Tensor | None = None
    score: float = 0.0
    scores: Mapping[str, float] = field(default_factory=dict)
    step_rewards: Sequence[tuple[int, float]] = ()
    reward: float = 0.0
    advantages: Tensor | None = None
    returns: Tensor | None = None
    update_log_probs: Tensor | None = None
    update_entropies: Tensor | None = None

    def to(self, device: torch.device) -> "Experience":
        """A copy whose tensors lie on `device`."""
        tensors: dict[str, Any] = {n: value.to(device) for n, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class ExperienceBatch:
    """Experiences as tensors on the device: the rows that the model sees, and columns [B, T] of the responses.

    `loss_mask` marks the response tokens that are trained; it may have holes. Optional columns are None when any
    experience lacks them. `rows` are the experiences themselves.
    """

    layout: TokenLayout
    loss_mask: Tensor
    engine_log_probs: Tensor
    advantages: Tensor | None
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    rows: tuple[Experience, ...] = ()


LAYOUTS: Mapping[str, Callable[[Sequence[Tensor], Sequence[Tensor], int], TokenLayout]] = {
    "right": padded_layout,
    "left": partial(padded_layout, side="left"),
    "packed": packed_layout,
    "shared": shared_prompt_layout,
}
"""How responses may lie in a batch; the numbers are the same. "shared" puts responses to one prompt that stand side by
side behind that prompt."""


@dataclass(frozen=True, kw_only=True)
class Collator:
    """Makes batches for one model.

    layout: name of an entry of `LAYOUTS`.
    """

    pad_token_id: int
    device: torch.device
    layout: str = "right"

    def __call__(self, experiences: Sequence[Experience]) -> ExperienceBatch:
        """A batch of at least one experience."""
        prompts, responses = [e.prompt_ids for e in experiences], [e.response_ids for e in experiences]
        layout = LAYOUTS[self.layout](prompts, responses, self.pad_token_id)

        def columns(name: str) -> Tensor | None:
            tensors = [getattr(e, name) for e in experiences]
            if any(t is None for t in tensors):
                return None
            return to_device(right_pad(tensors, 0)[0], self.device)

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
            values=columns("values"),
            returns=columns("returns"),
            rows=tuple(experiences),
        )


def reward_sample(experience: Experience) -> RewardSample:
    """What reward functions may look at."""
    return RewardSample(
        response=experience.response,
        response_ids=tuple(experience.response_ids.tolist()),
        prompt=experience.prompt,
        reference=experience.reference,
        label=experience.label,
        truncated=experience.truncated,
    )


def placeholder(experiences: Sequence[Experience]) -> Experience:
    """A two-token row that keeps a rank in step with the others' forwards; it must carry zero weight."""
    token = experiences[0].prompt_ids[:1] if experiences else torch.zeros(1, dtype=torch.long)
    return Experience(
        group=-1,
        prompt_ids=token,
        response_ids=token.clone(),
        response_mask=torch.zeros(1, dtype=torch.bool),
        engine_log_probs=torch.zeros(1),
        weights_version=0,
        truncated=False,
        old_log_probs=torch.zeros(1),
        ref_log_probs=torch.zeros(1),
        values=torch.zeros(1),
        advantages=torch.zeros(1),
        returns=torch.zeros(1),
    )
