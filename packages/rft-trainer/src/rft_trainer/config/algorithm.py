"""Advantages, losses and batches of an update."""

from dataclasses import dataclass
from typing import Literal

from rft_trainer.algorithms import LossOptions
from rft_trainer.config.ranges import below


@dataclass(frozen=True, kw_only=True)
class AlgorithmOptions:
    """Advantages, losses and batches of an update."""

    advantage_estimator: str = "group_norm"
    """Name of an AdvantageEstimator."""
    advantage_std: Literal["sample", "population"] = "sample"
    """Deviation of group_norm: divided by n - 1, or by n."""
    advantage_scale: Literal["group", "batch", "none"] = "group"
    """Whose deviation divides in group_norm: the group's, that of all rewards of the step, or none."""
    whiten_advantages: bool | None = None
    """Whiten the advantages once over all ranks; none: as the estimator's published form does."""
    advantage_clip: float | None = None
    """Bound on the size of an advantage."""
    gamma: float = 1.0
    """Discount per token."""
    gae_lambda: float = 0.95
    """Lambda of gae."""
    policy_loss: str = "ppo"
    """Name of a PolicyLoss."""
    eps_clip: float | None = None
    """Lower clip of the policy loss; none: the loss's own (0.2 for ppo)."""
    eps_clip_high: float | None = None
    """Upper clip of the policy loss; none: eps_clip, or the loss's own."""
    dual_clip: float | None = None
    """Largest ratio of tokens with a negative advantage, above 1 (ppo, clip_higher, dual_clip)."""
    sapo_tau_positive: float | None = None
    """Temperature of sapo for advantages above 0."""
    sapo_tau_negative: float | None = None
    """Temperature of sapo for the others."""
    cpgd_drift_coef: float | None = None
    """Weight of cpgd's policy drift."""
    cpgd_drift_cap: float | None = None
    """Largest ratio - 1 that the gradient of cpgd's drift uses."""
    entropy_coef: float = 0.0
    """Weight of the entropy that is added to the objective."""
    high_entropy_ratio: float = 1.0
    """Share of each response's tokens, those of highest entropy, that the policy loss trains on; 1: all."""
    expert_balance_coef: float = 0.0
    """Weight of the load balance of a mixture of experts; 0: none."""
    loss_aggregation: str = "token-mean"
    """How token losses become one number."""
    max_epochs: int = 1
    """Passes over each rollout."""
    train_batch_size: int | None = None
    """Responses per optimiser step over all ranks; none: the whole rollout, one update."""
    replay_on_device: bool = False
    """Keep a step's responses on the device while they are trained on, instead of on the host."""
    micro_train_batch_size: int = 8
    """Responses per forward and backward on one rank."""
    max_tokens_per_micro_batch: int | None = None
    """Token budget of a micro-batch instead of a count of responses."""
    padding_side: Literal["right", "left"] = "right"
    """Where the padding of a micro-batch goes: same numbers."""
    packing: bool = False
    """Lay the responses of a micro-batch end to end, without padding: same numbers, no padding tokens computed."""
    share_prompts: bool = False
    """Put the responses of a group side by side behind their prompt: same numbers, fewer tokens for long prompts."""

    def _algorithm_problems(self) -> list[str]:
        problems = below(
            self, 1, "max_epochs", "micro_train_batch_size", "max_tokens_per_micro_batch", "train_batch_size"
        ) + below(self, 0, "entropy_coef", "advantage_clip", "expert_balance_coef")
        for name in ("gamma", "gae_lambda", "high_entropy_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                problems.append(f"{name} is {getattr(self, name)}: give a number between 0 and 1")
        if self.high_entropy_ratio == 0:
            problems.append("high_entropy_ratio is 0: no token would be trained; give a share above 0")
        if self.share_prompts and self.max_tokens_per_micro_batch is not None:
            problems.append(
                f"share_prompts and max_tokens_per_micro_batch {self.max_tokens_per_micro_batch}: a token budget takes "
                "groups apart; use micro_train_batch_size"
            )
        chosen = {
            "packing": self.packing,
            "share_prompts": self.share_prompts,
            "padding_side left": self.padding_side == "left",
        }
        layouts = [name for name, is_chosen in chosen.items() if is_chosen]
        if len(layouts) > 1:
            problems.append(f"{' and '.join(layouts)}: a micro-batch has one layout; leave all but one of them out")
        return problems

    @property
    def batch_layout(self) -> str:
        """Name of the layout of a micro-batch."""
        return "shared" if self.share_prompts else "packed" if self.packing else self.padding_side

    def loss_options(self) -> LossOptions:
        """The numbers of the policy loss that were set; the rest are the loss's own."""
        high = self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
        return LossOptions(
            clip_low=self.eps_clip,
            clip_high=high,
            dual_clip=self.dual_clip,
            tau_positive=self.sapo_tau_positive,
            tau_negative=self.sapo_tau_negative,
            drift_coef=self.cpgd_drift_coef,
            drift_cap=self.cpgd_drift_cap,
        )
