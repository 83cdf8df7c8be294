"""From a response's score to its reward: penalties, normalisation, divergence from the reference."""

from dataclasses import dataclass
from typing import Literal

from rft_trainer.algorithms import AdaptiveKL, FixedKL, KLController
from rft_trainer.config.ranges import below


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """From a response's score to its reward: penalties, normalisation, divergence from the reference."""

    partial_credit: float = 0.0
    """Weight of the app's score for right parts of an answer, beside the one for the answer; 0: the answer alone."""
    init_kl_coef: float = 0.0
    """Weight of the KL divergence from the reference; 0: no reference is loaded."""
    kl_estimator: str = "k3"
    """Estimator of the KL term; a+b has the value of a and the gradient of b."""
    kl_in_reward: bool = False
    """Subtract the divergence from the token rewards instead of adding it to the loss."""
    kl_target: float | None = None
    """Divergence per token that an adaptive coefficient steers to; none: the coefficient stays."""
    kl_horizon: float = 10000.0
    """Responses over which the adaptive coefficient reacts."""
    overlong_buffer: int = 0
    """Last tokens of generate_max_len in which a growing penalty is subtracted from the reward; 0: no penalty."""
    overlong_factor: float = 1.0
    """The penalty at generate_max_len."""
    overlong_filter: bool = False
    """Leave responses that were cut by the length limit out of the loss and of its divisor."""
    reward_normalisation: Literal["none", "scale", "centre"] = "none"
    """Divide rewards by the deviation of all rewards so far; centre subtracts their mean as well."""
    reward_clip: float | None = None
    """Bound on the size of a reward, after normalisation."""

    def _reward_problems(self) -> list[str]:
        problems = below(self, 0, "partial_credit", "init_kl_coef", "overlong_buffer", "overlong_factor", "reward_clip")
        if self.kl_target is not None and (self.kl_target <= 0 or self.kl_horizon <= 0):
            problems.append(f"kl_target is {self.kl_target} and kl_horizon is {self.kl_horizon}: give numbers above 0")
        for name, asked in (("kl_in_reward", self.kl_in_reward), ("kl_target", self.kl_target is not None)):
            if asked and self.init_kl_coef == 0:
                problems.append(f"{name} and init_kl_coef 0: no reference is read without a coefficient; raise it")
        return problems

    def kl_controller(self) -> KLController:
        """The coefficient of the run."""
        if self.kl_target is None:
            return FixedKL(self.init_kl_coef)
        return AdaptiveKL(self.init_kl_coef, target=self.kl_target, horizon_samples=self.kl_horizon)
