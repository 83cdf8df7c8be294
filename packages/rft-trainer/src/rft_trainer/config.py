"""The one configuration of a run: flat, frozen, checked when it is made.

Field names are the command-line flags. Units are in the names or in the comment of the field.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from rft_trainer.algorithms import LossOptions
from rft_trainer.errors import ConfigurationError
from rft_trainer.optim import AdamWConfig, ScheduleConfig

EngineType = Literal["hf", "vllm", "sglang"]
Precision = Literal["auto", "fp32", "bf16"]

_AT_LEAST_ONE = (
    "prompt_max_len",
    "engine_tp_size",
    "rollout_batch_size",
    "n_samples_per_prompt",
    "generate_max_len",
    "max_epochs",
    "micro_train_batch_size",
    "max_steps",
)
_AT_LEAST_ZERO = (
    "init_kl_coef",
    "weight_decay",
    "max_norm",
    "actor_learning_rate",
    "max_weight_lag",
    "eval_steps",
    "save_steps",
    "lr_warmup_steps",
    "seed",
    "rollouts_max_mib",
)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What a backend builds an optimiser from; `max_norm` 0 means that gradients are never clipped."""

    adamw: AdamWConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    max_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RFTConfig:
    """Every setting of a run. Raises ConfigurationError naming field, value and remedy."""

    # -- model and data
    pretrain: str | None = None
    """Folder or hub id of the initial checkpoint."""
    dataset: str | None = None
    """JSONL or parquet file, or the id of a data set that `datasets` loads."""
    eval_dataset: str | None = None
    """Held-out problems, same forms; none: no evaluation."""
    dataset_split: str = "train"
    """Split that is trained on when `dataset` is a hub id."""
    eval_split: str = "test"
    """Split that is evaluated when `eval_dataset` is a hub id."""
    input_key: str = "question"
    """Field that holds the problem."""
    reference_key: str = "answer"
    """Field that holds the gold answer."""
    label_key: str | None = None
    """Field that chooses the reward recipe; none: the app's default."""
    system_prompt: str | None = None
    """System message in front of each problem."""
    input_template: str | None = None
    """Format string around the problem, with one `{}`."""
    prompt_max_len: int = 512
    """Longest prompt in tokens; longer prompts are an error."""
    eval_limit: int | None = None
    """Evaluate the first so many held-out problems; none: all."""

    # -- distribution
    fsdp: bool = False
    """FSDP2 instead of DeepSpeed ZeRO."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """ZeRO stage when DeepSpeed is used."""
    precision: Precision = "auto"
    """auto: bf16 compute with fp32 masters on a GPU, fp32 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes the GPU when there is one."""
    collective_timeout_seconds: float = 1800.0
    """A collective that takes longer ends the job."""
    collective_guard: bool = False
    """Check every rank's collectives against each other and name the rank that diverges."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward."""

    # -- rollout
    engine_type: EngineType = "hf"
    """Rollout engine: hf is embedded and needs no extra."""
    engine_tp_size: int = 1
    """Ranks that share one rollout engine."""
    engine_mem_util: float = 0.5
    """Share of the device that vLLM or SGLang may take."""
    enable_engine_sleep: bool = False
    """Let the engine sleep while the actor trains."""
    rollout_batch_size: int = 8
    """Prompts per step, over all ranks."""
    n_samples_per_prompt: int = 8
    """Responses per prompt: one group."""
    generate_max_len: int = 256
    """Longest response in tokens."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts."""
    top_p: float = 1.0
    """Nucleus of training rollouts; 1 is off."""
    top_k: int = 0
    """Largest number of candidate tokens; 0 is off."""
    max_weight_lag: int = 0
    """Updates by which a rollout may be older than the actor."""

    # -- algorithm
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

    # -- optimiser
    actor_learning_rate: float = 1e-6
    """Peak learning rate."""
    weight_decay: float = 0.0
    """AdamW decay of matrices."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas."""
    max_norm: float = 1.0
    """Largest global gradient norm; 0: never clipped."""
    lr_scheduler: str = "constant"
    """constant, linear or cosine."""
    lr_warmup_steps: int = 0
    """Optimiser steps of warm-up."""
    freeze: tuple[str, ...] = ()
    """Prefixes of parameter names that stay fixed; each must match something."""
    adam_offload: bool = False
    """Keep optimiser state on the host."""

    # -- run
    output_dir: Path = Path("runs/default")
    """Everything the run writes."""
    overwrite: bool = False
    """Allow an output folder that already holds a run: the old run is deleted."""
    max_steps: int = 10
    """Rollout and update rounds."""
    eval_steps: int = 0
    """Evaluate every so many steps besides before and after; 0: only those two."""
    save_steps: int = 0
    """Checkpoint every so many steps; 0: only at the end."""
    resume_from: Path | None = None
    """A checkpoint folder to continue from."""
    seed: int = 0
    """Seed of weights, data order and sampling."""
    tensorboard: bool = True
    """Write TensorBoard events beside the JSONL."""
    rollouts_max_mib: float = 64.0
    """Bytes of rollouts that are kept for reading, in MiB."""

    def __post_init__(self) -> None:
        problems = [*self._range_problems(), *self._batch_problems()]
        if self.train_batch_size is None or self.train_batch_size >= 1:
            try:
                self.actor_optimizer()
            except ValueError as problem:
                problems.append(str(problem))
        if problems:
            raise ConfigurationError("\n".join(problems))

    def _range_problems(self) -> list[str]:
        problems = [
            f"{name} is {getattr(self, name)}: give an integer of at least 1"
            for name in _AT_LEAST_ONE
            if getattr(self, name) < 1
        ]
        if self.temperature < 0:
            problems.append(f"temperature is {self.temperature}: give 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}: give a number in (0, 1]")
        if self.top_k < 0:
            problems.append(f"top_k is {self.top_k}: give 0 (off) or more")
        if not 0 < self.engine_mem_util < 1:
            problems.append(f"engine_mem_util is {self.engine_mem_util}: give a share between 0 and 1")
        if self.input_template is not None and self.input_template.count("{}") != 1:
            problems.append(f"input_template is {self.input_template!r}: put exactly one {{}} where the problem goes")
        problems += [
            f"{name} is {getattr(self, name)}: give 0 or more" for name in _AT_LEAST_ZERO if getattr(self, name) < 0
        ]
        for name in ("eval_limit", "max_tokens_per_micro_batch", "train_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{name} is {value}: give at least 1, or leave it out")
        return problems

    def _batch_problems(self) -> list[str]:
        samples = self.rollout_batch_size * self.n_samples_per_prompt
        if self.share_prompts and self.max_tokens_per_micro_batch is not None:
            return [
                f"share_prompts and max_tokens_per_micro_batch {self.max_tokens_per_micro_batch}: a token budget takes "
                "groups apart; use micro_train_batch_size"
            ]
        if self.train_batch_size is not None and self.train_batch_size >= 1 and samples % self.train_batch_size:
            return [
                f"train_batch_size is {self.train_batch_size}, which does not divide the {samples} responses of a step "
                f"(rollout_batch_size {self.rollout_batch_size} x n_samples_per_prompt {self.n_samples_per_prompt}): "
                "choose a divisor"
            ]
        return []

    @property
    def samples_per_step(self) -> int:
        """Responses of one rollout over all ranks."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps after one rollout."""
        if self.train_batch_size is None:
            return self.max_epochs
        return self.max_epochs * (self.samples_per_step // self.train_batch_size)

    def loss_options(self) -> LossOptions:
        """The numbers of the policy loss that were set; the rest are the loss's own."""
        high = self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
        return LossOptions(clip_low=self.eps_clip, clip_high=high)

    def actor_optimizer(self) -> OptimizerConfig:
        """The part that the actor's optimiser is built from."""
        return OptimizerConfig(
            adamw=AdamWConfig(lr=self.actor_learning_rate, betas=self.adam_betas, weight_decay=self.weight_decay),
            schedule=ScheduleConfig(
                kind=self.lr_scheduler,
                warmup_steps=self.lr_warmup_steps,
                total_steps=self.max_steps * self.updates_per_step,
            ),
            max_norm=self.max_norm,
        )

    def as_dict(self) -> dict[str, object]:
        """Plain values for a JSON file, in declaration order."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: str(v) if isinstance(v, Path) else list(v) if isinstance(v, tuple) else v for k, v in values.items()}
