"""Wires a trainer from a configuration and a strategy; the one place that knows every component."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rft_engines import SamplingParams
from rft_rewards import RewardComputationEngine
from rft_trainer.algorithms import AdvantageEstimator, KLController
from rft_trainer.checkpoint import CheckpointStore, RetentionPolicy, TrainerState, fitted_settings
from rft_trainer.config import RFTConfig
from rft_trainer.data import BlendedDataset, BlendSampler, EncodedPrompt, Sampler
from rft_trainer.errors import ConfigurationError
from rft_trainer.evaluators import make_evaluator
from rft_trainer.experience.credit import CreditAssigner, CreditConfig
from rft_trainer.experience.dynamic import DynamicSampling, GroupFilter
from rft_trainer.experience.experience import Collator
from rft_trainer.experience.maker import FastExperienceMaker
from rft_trainer.experience.micro_batches import MicroBatchPlanner
from rft_trainer.experience.partial import PartialRollouts
from rft_trainer.experience.rollouts import Rollouts
from rft_trainer.memory.build import StagedMemory, phase_memory
from rft_trainer.memory.forecast import AVERAGE, EXPERIENCES
from rft_trainer.models import Actor
from rft_trainer.report import Column, Console, LoggerGroup
from rft_trainer.roles import scoring_options
from rft_trainer.run_files import drop_later_files, finished_steps, make_loggers, rollout_keeper
from rft_trainer.strategy import Strategy, TrainState
from rft_trainer.trainer.averaging import WeightAverage
from rft_trainer.trainer.ppo import CRITIC_FOLDER, PPOTrainer
from rft_trainer.trainer.rates import Rates, peak_flops
from rft_trainer.trainer.update import ImportanceConfig, PolicyUpdate, UpdateConfig
from rft_trainer.trainer.wall_clock import WallClockGuard

STEP_COLUMNS = (
    Column("rollout/reward", "reward"),
    Column("rollout/accuracy", "accuracy", ".1%"),
    Column("train/kl", "kl", ".4f"),
    Column("train/clip_fraction", "clip", ".3f"),
    Column("rollout/response_length", "length", ".1f"),
    Column("rollout/mixed_groups", "mixed", ".0%"),
    Column("train/gap/gap", "gap", ".1e"),
    Column("train/grad_norm", "grad", ".2f"),
    *(
        Column(f"perf/seconds_{name}", f"{name} s", ".1f")
        for name in ("step", "generate", "reference", "rewards", "update", "sync")
    ),
)


@dataclass(frozen=True, kw_only=True)
class Ingredients:
    """What an app brings: models as the strategy wrapped them, tokenizer, prompts and rewards."""

    actor: TrainState
    initial_model: nn.Module | None
    critic: TrainState | None = None
    teacher: nn.Module | None = None

    def trained(self) -> dict[str, TrainState]:
        """The models under training, by role."""
        return {"actor": self.actor} if self.critic is None else {"actor": self.actor, "critic": self.critic}

    def frozen(self) -> dict[str, nn.Module]:
        """The models that are only scored, by role."""
        named = {"reference": self.initial_model, "teacher": self.teacher}
        return {role: model for role, model in named.items() if model is not None}

    tokenizer: Any
    prompts: Sequence[EncodedPrompt]
    held_out: Sequence[EncodedPrompt] | Mapping[str, Sequence[EncodedPrompt]]
    """One set, or several by name."""
    rewards: RewardComputationEngine
    started: float | None = None
    """`time.perf_counter()` at the run's start, from which `max_seconds` counts; None: when the trainer is made."""


def build_trainer(config: RFTConfig, strategy: Strategy, ingredients: Ingredients) -> PPOTrainer:
    """A trainer ready to `fit`; resumed when the configuration names a checkpoint. Collective over the world."""
    actor, data = ingredients.actor, strategy.data
    check_ingredients(config, ingredients)
    kl = config.kl_controller()
    average = WeightAverage(actor, config.ema_decay) if config.ema_decay > 0 else None
    maker, update = _maker_and_update(config, strategy, ingredients, kl, average)
    checkpoints = CheckpointStore(config.output_dir / "checkpoints", data, _retention(config))
    settings = fitted_settings(config, strategy.model_form(actor))
    progress = Console(enabled=data.rank == 0, columns=STEP_COLUMNS)
    rollouts = _rollouts(config, strategy, ingredients, maker, progress)
    resumed: TrainerState | None = None

    def load(folder: Path) -> None:
        _load_models(strategy, ingredients, folder)
        if average is not None:
            average.load(folder, data.rank)
        rollouts.load_held(folder, data.rank)

    if config.resume_from is not None:
        resumed = checkpoints.load(
            config.resume_from,
            load,
            strategy=strategy.backend.name,
            # Unfinished responses and averages are kept by the rank that holds them.
            resizable=strategy.backend.resizable and config.partial_rollout_tokens is None and average is None,
            settings=settings,
        )
    finished = finished_steps(config, resumed)
    if finished is not None:
        data.on_main(lambda: drop_later_files(config.output_dir, finished))
    trainer = PPOTrainer(
        config=config,
        actor=actor,
        reference=ingredients.initial_model,
        critic=ingredients.critic,
        teacher=ingredients.teacher,
        kl=kl,
        backend=strategy.backend,
        runtime=strategy.runtime,
        data=data,
        rollouts=rollouts,
        maker=maker,
        update=update,
        average=average,
        evaluator=make_evaluator(config, strategy, maker, ingredients.held_out),
        checkpoints=checkpoints,
        settings=settings,
        rates=_rates(config, strategy, actor),
        sampling=sampling_params(config),
        logger=LoggerGroup(make_loggers(config, finished) if data.rank == 0 else ()),
        progress=progress,
        keep_rollouts=rollout_keeper(config, tokenizer=ingredients.tokenizer, rank=data.rank, world_size=data.size),
        guard=WallClockGuard(config.max_seconds, started=ingredients.started),
        memory=_memory(config, strategy, ingredients, maker, average),
    )
    if resumed is not None:
        trainer.resume(resumed)
    return trainer


def _memory(
    config: RFTConfig,
    strategy: Strategy,
    ingredients: Ingredients,
    maker: FastExperienceMaker,
    average: WeightAverage | None,
) -> StagedMemory:
    beside = {EXPERIENCES: maker.tensors} | ({} if average is None else {AVERAGE: average.tensors})
    return phase_memory(config, strategy, trained=ingredients.trained(), frozen=ingredients.frozen(), beside=beside)


def _sampler(config: RFTConfig, strategy: Strategy, prompts: Sequence[EncodedPrompt]) -> Sampler:
    if not isinstance(prompts, BlendedDataset):
        return strategy.build_sampler(len(prompts), config.rollout_batch_size, drop_last=config.drop_last)
    return BlendSampler(
        prompts.sizes,
        prompts.weights,
        batch_size=config.rollout_batch_size,
        rank=strategy.data.rank,
        num_ranks=strategy.data.size,
        seed=config.seed,
    )


def experience_maker(config: RFTConfig, strategy: Strategy, ingredients: Ingredients) -> FastExperienceMaker:
    """The maker of a run that only evaluates."""
    return _maker_and_update(config, strategy, ingredients, config.kl_controller(), None)[0]


def sampling_params(config: RFTConfig) -> SamplingParams:
    """Sampling of training rollouts."""
    return SamplingParams(
        n=config.n_samples_per_prompt,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_new_tokens=config.generate_max_len,
        first_token_temperature=config.first_token_temperature,
    )


def _rollouts(
    config: RFTConfig, strategy: Strategy, ingredients: Ingredients, maker: FastExperienceMaker, progress: Console
) -> Rollouts:
    sampler = _sampler(config, strategy, ingredients.prompts)
    dynamic = partial = None
    if config.dynamic_sampling:
        wanted = GroupFilter(
            group_size=config.n_samples_per_prompt,
            wanted=config.rollout_batch_size,
            rounds=config.dynamic_sampling_rounds,
            lowest_mean=config.lowest_group_score,
            highest_mean=config.highest_group_score,
        )
        dynamic = DynamicSampling(wanted, data=strategy.data, draw=sampler.next_batch, say=progress.line)
    if config.partial_rollout_tokens is not None:
        partial = PartialRollouts(
            tokens=config.partial_rollout_tokens,
            staleness=config.partial_rollout_staleness,
            generate=strategy.runtime.generate,
        )
    return Rollouts(
        maker=maker,
        sampler=sampler,
        prompts=ingredients.prompts,
        sampling=sampling_params(config),
        dynamic=dynamic,
        partial=partial,
    )


def _maker_and_update(
    config: RFTConfig,
    strategy: Strategy,
    ingredients: Ingredients,
    kl: KLController,
    average: WeightAverage | None,
) -> tuple[FastExperienceMaker, PolicyUpdate]:
    tokenizer = ingredients.tokenizer
    planner = MicroBatchPlanner(
        strategy.data,
        responses=config.micro_train_batch_size,
        max_tokens=config.max_tokens_per_micro_batch,
        keep_order=config.share_prompts,
    )
    collator = Collator(pad_token_id=tokenizer.pad_token_id, device=strategy.device, layout=config.batch_layout)
    maker = FastExperienceMaker(
        runtime=strategy.runtime,
        rewards=ingredients.rewards,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        credit=CreditAssigner(credit_config(config), strategy.data, kl),
        planner=planner,
        collator=collator,
        score_with_actor=scores_with_actor(config),
        count_experts=config.expert_balance_coef > 0,
        base_seed=config.seed,
    )

    def on_step() -> None:
        strategy.runtime.note_update()
        if average is not None:
            average.update()

    update = PolicyUpdate(
        update_config(config),
        backend=strategy.backend,
        data=strategy.data,
        planner=planner,
        collator=collator,
        kl=kl,
        on_step=on_step,
    )
    return maker, update


def scores_with_actor(config: RFTConfig) -> bool:
    """Whether old log-probabilities are computed after the rollout.

    One update per rollout needs none: its own forward, detached, is the old policy. What is made before the update (the
    divergence in the reward, distillation, the choices of experts) needs them.
    """
    teaches = AdvantageEstimator.get(config.advantage_estimator).needs_teacher
    # Responses that were held back may make a step larger than samples_per_step.
    may_grow = config.partial_rollout_tokens is not None and config.train_batch_size is not None
    made_before = config.kl_in_reward or teaches or config.expert_balance_coef > 0
    return config.updates_per_step > 1 or may_grow or made_before


def credit_config(config: RFTConfig) -> CreditConfig:
    """The part of the configuration that leads from scores to advantages."""
    return CreditConfig(
        estimator=config.advantage_estimator,
        group_size=config.n_samples_per_prompt,
        gamma=config.gamma,
        lam=config.gae_lambda,
        std=config.advantage_std,
        scale=config.advantage_scale,
        distillation_coef=config.distillation_coef,
        whiten=config.whiten_advantages,
        normalisation=config.reward_normalisation,
        reward_clip=config.reward_clip,
        advantage_clip=config.advantage_clip,
        max_tokens=config.generate_max_len,
        overlong_buffer=config.overlong_buffer,
        overlong_factor=config.overlong_factor,
        overlong_filter=config.overlong_filter,
        kl_estimator=config.kl_estimator if config.kl_in_reward else None,
    )


def check_ingredients(config: RFTConfig, ingredients: Ingredients) -> None:
    """The models that the configuration speaks of are there, and the actor scores what the engine samples.

    Raises:
        ConfigurationError: before any collective, on every rank.
    """
    estimator = AdvantageEstimator.get(config.advantage_estimator)
    estimator.check(has_critic=ingredients.critic is not None, has_teacher=ingredients.teacher is not None)
    if config.init_kl_coef > 0 and ingredients.initial_model is None:
        raise ConfigurationError(
            f"init_kl_coef is {config.init_kl_coef} and no initial_model was given: give one, or 0"
        )
    if config.expert_balance_coef > 0 and getattr(ingredients.actor.network, "experts", None) is None:
        raise ConfigurationError(
            f"expert_balance_coef is {config.expert_balance_coef} and the model has no experts: leave it at 0"
        )
    scoring = getattr(ingredients.actor.network, "scoring", None)
    if scoring is None:
        return
    sampled = Actor.scoring_of(**scoring_options(config))
    if scoring != sampled:
        raise ConfigurationError(
            f"the actor scores {dict(scoring)} and rollouts are sampled from {sampled}: on-policy ratios would not be "
            "1; build Actor(model, **scoring_options(config))"
        )


def _load_models(strategy: Strategy, ingredients: Ingredients, folder: Path) -> None:
    strategy.load_checkpoint(ingredients.actor, folder)
    if ingredients.critic is not None:
        strategy.load_checkpoint(ingredients.critic, folder / CRITIC_FOLDER)


def update_config(config: RFTConfig) -> UpdateConfig:
    """The update's part of the configuration."""
    fixed = config.generate_max_len if config.loss_aggregation == "seq-mean-token-sum-norm" else None
    return UpdateConfig(
        policy_loss=config.policy_loss,
        options=config.loss_options(),
        aggregation=config.loss_aggregation,
        fixed_length=fixed,
        kl_estimator=config.kl_estimator if config.init_kl_coef > 0 and not config.kl_in_reward else None,
        importance=ImportanceConfig(
            mode=config.importance_sampling,
            level=config.importance_level,
            cap=config.importance_cap,
            floor=config.importance_floor,
        ),
        entropy_coef=config.entropy_coef,
        high_entropy_ratio=config.high_entropy_ratio,
        expert_balance_coef=config.expert_balance_coef,
        value_clip=config.value_clip,
        epochs=config.max_epochs,
        replay_on_device=config.replay_on_device,
        train_batch_size=config.train_batch_size,
        keep_groups=config.share_prompts,
        group_size=config.n_samples_per_prompt,
        seed=config.seed,
    )


def _rates(config: RFTConfig, strategy: Strategy, actor: TrainState) -> Rates:
    # Without gradients of all weights an update takes less work than the rule of six says.
    whole = all(parameter.requires_grad for parameter in actor.network.parameters())
    return Rates(
        world_size=strategy.data.size,
        epochs=config.max_epochs,
        parameters=strategy.parameter_count(actor) if whole else None,
        peak_flops=peak_flops(strategy.device) if strategy.bf16 else None,
    )


def _retention(config: RFTConfig) -> RetentionPolicy:
    return RetentionPolicy(
        count=config.max_checkpoints,
        bytes=int(config.max_checkpoints_gib * 2**30),
        metric=config.best_metric,
        lowest=config.best_metric_lowest,
    )
