"""Advantages, losses and batches of an update."""

from dataclasses import dataclass

from rft_trainer.algorithms import LossOptions
from rft_trainer.config.ranges import below


@dataclass(frozen=True, kw_only=True)
class AlgorithmOptions:
    """Advantages, losses and batches of an update."""

    advantage_estimator: str = "group_norm"
    """Name of an AdvantageEstimator."""
    policy_loss: str = "ppo"
    """Name of a PolicyLoss."""
    eps_clip: float | None = None
    """Lower clip of the policy loss; none: the loss's own (0.2 for ppo)."""
    eps_clip_high: float | None = None
    """Upper clip of the policy loss; none: eps_clip, or the loss's own."""
    loss_aggregation: str = "token-mean"
    """How token losses become one number."""
    init_kl_coef: float = 0.0
    """Weight of the KL divergence from the reference; 0: no reference is loaded."""
    kl_estimator: str = "k3"
    """Estimator of the KL term."""
    max_epochs: int = 1
    """Passes over each rollout."""
    train_batch_size: int | None = None
    """Responses per optimiser step over all ranks; none: the whole rollout, one update."""
    micro_train_batch_size: int = 8
    """Responses per forward and backward on one rank."""
    max_tokens_per_micro_batch: int | None = None
    """Token budget of a micro-batch instead of a count of responses."""
    share_prompts: bool = False
    """Put the responses of a group side by side behind their prompt: same numbers, fewer tokens for long prompts."""

    def _algorithm_problems(self) -> list[str]:
        problems = below(
            self, 1, "max_epochs", "micro_train_batch_size", "max_tokens_per_micro_batch", "train_batch_size"
        ) + below(self, 0, "init_kl_coef")
        if self.share_prompts and self.max_tokens_per_micro_batch is not None:
            problems.append(
                f"share_prompts and max_tokens_per_micro_batch {self.max_tokens_per_micro_batch}: a token budget takes "
                "groups apart; use micro_train_batch_size"
            )
        return problems

    def loss_options(self) -> LossOptions:
        """The numbers of the policy loss that were set; the rest are the loss's own."""
        high = self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
        return LossOptions(clip_low=self.eps_clip, clip_high=high)
