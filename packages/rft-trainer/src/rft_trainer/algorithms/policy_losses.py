"""Policy losses under one call: `PolicyLoss.get(name)(LossInputs(...), LossOptions(...)) -> LossOutputs`.

Every loss is [B, T], per token (a sequence-level loss repeats its number on each token of the row) and 0 where masked;
`aggregate` makes the scalar. Rows are single responses: a packed batch is unpacked to rows before its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from rft_trainer.algorithms import surrogates
from rft_trainer.algorithms.registry import Registered
from rft_trainer.algorithms.statistics import (
    MetricMax,
    MetricSum,
    keep_masked,
    metric_max,
    metric_mean,
    require_same_shape,
)
from rft_trainer.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a policy loss may read, all [B, T].

    Attributes:
        log_probs: of the policy being trained, with gradient.
        old_log_probs: of the same policy when the responses were scored. None means this very forward, detached: right
            when one update follows a rollout, and saves a pass.
        advantages: no gradient flows into them.
        mask: tokens to train on.
        weights: factors on the per-token loss without gradient, such as `importance_weights`; None for ones.
    """

    log_probs: Tensor
    old_log_probs: Tensor | None = None
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        require_same_shape(
            log_probs=self.log_probs,
            old_log_probs=self.old_log_probs,
            advantages=self.advantages,
            mask=self.mask,
            weights=self.weights,
        )


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Numbers that shape a loss; None takes the default of the loss (`PolicyLoss.defaults`).

    Attributes:
        clip_low: lower clip. ppo, gspo, cpgd, cispo: the ratio stays above 1 - clip_low. gmpo: log-ratio above
            -clip_low.
        clip_high: upper clip. ppo, gspo, cpgd, cispo: the ratio stays below 1 + clip_high. gmpo: log-ratio below
            clip_high.
        dual_clip: bound c > 1 on the ratio of negative advantages.
        tau_positive, tau_negative: temperatures of sapo.
        drift_coef: weight of cpgd's policy drift.
        drift_cap: largest ratio - 1 that the gradient of the drift uses.
    """

    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    tau_positive: float | None = None
    tau_negative: float | None = None
    drift_coef: float | None = None
    drift_cap: float | None = None

    def __post_init__(self) -> None:
        for option, value in self.given().items():
            if value < 0 or (value == 0 and option.startswith("tau")):
                raise ConfigurationError(f"{option} must be positive, got {value}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigurationError(f"dual_clip must be greater than 1, got {self.dual_clip}; None switches it off")

    def given(self) -> dict[str, float]:
        """The options that are not None."""
        named = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class LossOutputs:
    """`loss` [B, T], 0 where masked, and detached `metrics` that add up over ranks and micro-batches."""

    loss: Tensor
    metrics: dict[str, MetricSum | MetricMax]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Registered):
    """One policy loss with its facts, and the registry of all of them.

    Attributes:
        name: what `get` takes.
        defaults: every option this loss reads, with its default; None means off.
        is_sequence_level: one number per response; choose an aggregation of rows (seq-mean-...).
        paper: source.
        compute: the pure function (SurrogateInputs, options) -> Surrogate.
    """

    name: str
    defaults: Mapping[str, float | None]
    is_sequence_level: bool = False
    paper: str
    compute: Callable[[surrogates.SurrogateInputs, Mapping[str, float | None]], surrogates.Surrogate]

    kind: ClassVar[str] = "policy loss"
    _registry: ClassVar[dict[str, Registered]] = {}

    def __call__(self, inputs: LossInputs, options: LossOptions | None = None) -> LossOutputs:
        """Per-token loss and metrics.

        Raises:
            ConfigurationError: an option is given that this loss does not read.
        """
        resolved = self.resolve(options)
        old = inputs.log_probs.detach() if inputs.old_log_probs is None else inputs.old_log_probs.detach()
        # hazard: a ratio that overflows fp32 has a NaN gradient even where it is clipped; e^60 is finite. One near 0 is
        # left as it is: bounding its logarithm would shift the mean of a row.
        log_ratio = keep_masked(inputs.log_probs.float() - old.float(), inputs.mask).clamp(max=60)
        surrogate = self.compute(
            surrogates.SurrogateInputs(
                log_ratio=log_ratio,
                log_probs=keep_masked(inputs.log_probs.float(), inputs.mask),
                advantages=keep_masked(inputs.advantages.detach().float(), inputs.mask),
                mask=inputs.mask.bool(),
            ),
            resolved,
        )
        loss = surrogate.loss
        if inputs.weights is not None:
            loss = loss * keep_masked(inputs.weights.detach().float(), inputs.mask)
        ratio = log_ratio.detach().exp()
        return LossOutputs(
            loss=keep_masked(loss, inputs.mask),
            metrics={
                "clip_fraction": metric_mean(surrogate.clipped.float(), inputs.mask),
                "ratio": metric_mean(ratio, inputs.mask),
                "ratio_max": metric_max(ratio, inputs.mask),
                "kl_old_new": metric_mean(log_ratio.detach().expm1() - log_ratio.detach(), inputs.mask),
            },
        )

    def resolve(self, options: LossOptions | None) -> dict[str, float | None]:
        """Every option of this loss with its number; call it at start-up to check a configuration."""
        given = {} if options is None else options.given()
        unread = sorted(set(given) - set(self.defaults))
        if unread:
            raise ConfigurationError(
                f"policy loss {self.name!r} does not read {', '.join(unread)}; it reads "
                f"{', '.join(sorted(self.defaults)) or 'no option'}"
            )
        return {**self.defaults, **given}


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    kind: str = "ppo",
    weights: Tensor | None = None,
    options: LossOptions | None = None,
) -> LossOutputs:
    """`PolicyLoss.get(kind)` on plain tensors [B, T]; see `LossInputs` for their meaning."""
    inputs = LossInputs(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask, weights=weights
    )
    return PolicyLoss.get(kind)(inputs, options)


for _entry in (
    PolicyLoss(
        name="ppo",
        defaults={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
        paper="PPO, Schulman et al., arXiv 1707.06347, section 3",
        compute=surrogates.ppo,
    ),
    PolicyLoss(
        name="clip_higher",
        defaults={"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
        paper="DAPO, Yu et al., arXiv 2503.14476, section 3.1",
        compute=surrogates.ppo,
    ),
    PolicyLoss(
        name="dual_clip",
        defaults={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
        paper="dual-clip PPO, Ye et al., arXiv 1912.09729",
        compute=surrogates.ppo,
    ),
    PolicyLoss(
        name="cpgd",
        defaults={"clip_low": 0.2, "clip_high": 0.2, "drift_coef": 0.0, "drift_cap": 0.2},
        paper="CPGD, Liu et al., arXiv 2505.12504",
        compute=surrogates.cpgd,
    ),
    PolicyLoss(
        name="gspo",
        defaults={"clip_low": 3e-4, "clip_high": 4e-4},
        is_sequence_level=True,
        paper="GSPO, Zheng et al., arXiv 2507.18071",
        compute=surrogates.gspo,
    ),
    PolicyLoss(
        name="gspo_token",
        defaults={"clip_low": 3e-4, "clip_high": 4e-4},
        paper="GSPO-token, Zheng et al., arXiv 2507.18071",
        compute=surrogates.gspo_token,
    ),
    PolicyLoss(
        name="gmpo",
        defaults={"clip_low": 0.4, "clip_high": 0.4},
        is_sequence_level=True,
        paper="GMPO, Zhao et al., arXiv 2507.20673",
        compute=surrogates.gmpo,
    ),
    PolicyLoss(
        name="cispo",
        defaults={"clip_low": 1.0, "clip_high": 4.0},
        paper="CISPO, MiniMax-M1, arXiv 2506.13585",
        compute=surrogates.cispo,
    ),
    PolicyLoss(
        name="sapo",
        defaults={"tau_positive": 1.0, "tau_negative": 1.05},
        paper="SAPO, Gao et al., arXiv 2511.20347",
        compute=surrogates.sapo,
    ),
    PolicyLoss(
        name="reinforce",
        defaults={},
        paper="REINFORCE, Williams 1992",
        compute=surrogates.reinforce,
    ),
):
    PolicyLoss.register(_entry)
