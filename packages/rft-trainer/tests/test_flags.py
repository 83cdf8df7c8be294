"""Every setting reaches something: what a component is built from differs when the setting differs."""

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rft_trainer.algorithms import AdaptiveKL, FixedKL, MismatchLimit, PolicyLoss
from rft_trainer.config import RFTConfig
from rft_trainer.errors import ConfigurationError
from rft_trainer.session import _sampler, credit_config, scores_with_actor, update_config
from rft_trainer.strategy import FSDPV2Strategy
from rft_trainer.trainer.update import ImportanceConfig
from rft_trainer.warm_start import warm_start_steps

BASE = RFTConfig(lr_scheduler="linear", lr_warmup_steps=1, max_steps=4, n_samples_per_prompt=4)

LAYOUTS = {"padding_side": "left", "packing": True, "share_prompts": True}
TOGETHER = {
    *LAYOUTS,
    "kl_in_reward",
    "kl_estimator",
    "kl_target",
    "kl_horizon",
    "importance_floor",
    "gap_warn",
    "gap_stop",
}
LENGTHS = ({"warm_start_epochs": 2}, {"warm_start_steps": 5}, {"warm_start_seconds": 9.0})
TOGETHER |= {"warm_start_packing"}
TOGETHER |= {"critic_learning_rate", "critic_warmup_steps", "lora_sync"}

# setting -> another value that an optimiser or the update is built from
OPTIMIZER = {
    "actor_learning_rate": 1e-3,
    "weight_decay": 0.1,
    "adam_betas": (0.8, 0.9),
    "max_norm": 0.5,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 2,
    "max_steps": 7,
    "max_epochs": 2,
}
UPDATE = {
    "policy_loss": "gspo",
    "eps_clip": 0.1,
    "eps_clip_high": 0.4,
    "loss_aggregation": "seq-mean-token-sum-norm",
    "init_kl_coef": 0.5,
    "dual_clip": 4.0,
    "sapo_tau_positive": 0.5,
    "sapo_tau_negative": 0.5,
    "cpgd_drift_coef": 0.1,
    "cpgd_drift_cap": 0.1,
    "entropy_coef": 0.1,
    "expert_balance_coef": 0.1,
    "high_entropy_ratio": 0.2,
    "value_clip": 0.1,
    "replay_on_device": True,
    "importance_sampling": "mask",
    "importance_level": "sequence",
    "importance_cap": 3.0,
    "train_batch_size": 8,
    "share_prompts": True,
    "seed": 9,
}
WARM_START = {
    "warm_start_learning_rate": 1e-3,
    "warm_start_lr_scheduler": "linear",
    "warm_start_lr_warmup_steps": 2,
    "warm_start_lr_min_ratio": 0.5,
    "weight_decay": 0.1,
    "max_norm": 0.5,
}
ADAPTERS = {"lora_rank": 2, "lora_alpha": 3.0, "lora_targets": ("q_proj",), "seed": 9}
CREDIT = {
    "advantage_estimator": "rloo",
    "n_samples_per_prompt": 2,
    "gamma": 0.9,
    "gae_lambda": 0.9,
    "advantage_std": "population",
    "advantage_scale": "batch",
    "distillation_coef": 0.5,
    "whiten_advantages": True,
    "reward_normalisation": "centre",
    "reward_clip": 1.0,
    "advantage_clip": 1.0,
    "generate_max_len": 99,
    "overlong_buffer": 9,
    "overlong_factor": 0.5,
    "overlong_filter": True,
}


@pytest.mark.parametrize("name", OPTIMIZER)
def test_the_optimiser_is_built_from(name):
    assert replace(BASE, **{name: OPTIMIZER[name]}).actor_optimizer() != BASE.actor_optimizer()


@pytest.mark.parametrize("name", WARM_START)
def test_supervised_steps_are_built_from(name):
    assert replace(BASE, **{name: WARM_START[name]}).warm_start_optimizer(9) != BASE.warm_start_optimizer(9)


@pytest.mark.parametrize("name", UPDATE)
def test_the_update_is_built_from(name):
    assert update_config(replace(BASE, **{name: UPDATE[name]})) != update_config(BASE)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_built_from(name):
    base = replace(BASE, lora_rank=4)
    other = replace(base, **{name: ADAPTERS[name]})
    assert other.adapters(other.seed) != base.adapters(base.seed)


@pytest.mark.parametrize("name", CREDIT)
def test_advantages_are_made_from(name):
    assert credit_config(replace(BASE, **{name: CREDIT[name]})) != credit_config(BASE)


def test_settings_that_act_together():
    with_kl = replace(BASE, init_kl_coef=0.1)
    in_reward = replace(with_kl, kl_in_reward=True)
    assert update_config(with_kl).kl_estimator == "k3"
    assert credit_config(with_kl).kl_estimator is None
    assert update_config(in_reward).kl_estimator is None
    assert credit_config(in_reward).kl_estimator == "k3"
    assert update_config(replace(with_kl, kl_estimator="k2")).kl_estimator == "k2"
    assert not scores_with_actor(with_kl)
    assert scores_with_actor(in_reward)
    adaptive = replace(with_kl, kl_target=0.02, kl_horizon=77.0).kl_controller()
    assert adaptive == AdaptiveKL(0.1, target=0.02, horizon_samples=77.0)
    assert with_kl.kl_controller() == FixedKL(0.1)
    masked = replace(BASE, importance_sampling="mask", importance_floor=0.5)
    assert update_config(masked).importance == ImportanceConfig(mode="mask", floor=0.5)
    assert replace(BASE, gap_warn=0.1, gap_stop=0.2).gap_limit() == MismatchLimit(warn=0.1, stop=0.2)
    assert replace(BASE, critic_learning_rate=0.1).critic_optimizer().adamw.lr == 0.1
    assert replace(BASE, critic_warmup_steps=1).actor_optimizer().schedule.total_steps == 3
    layouts = [replace(BASE, **{k: v}).batch_layout for k, v in LAYOUTS.items()]
    assert [BASE.batch_layout, *layouts] == ["right", "left", "packed", "shared"]
    supervised = [replace(BASE, warm_start_packing=packs).warm_start_layout for packs in (False, True)]
    assert supervised == ["right", "packed"]
    assert [warm_start_steps(replace(BASE, **change), 130) for change in LENGTHS] == [6, 5, None]


def test_what_a_lora_run_sends_is_chosen_by_engine():
    def alone(**changes):
        return replace(BASE, lora_rank=4, **changes).sends_adapter_only

    assert [alone(engine_type=engine) for engine in ("hf", "vllm", "sglang")] == [False, True, False]
    assert alone(lora_sync="adapter")
    assert not alone(lora_sync="merged", engine_type="vllm")
    # vLLM applies no adapter of a larger rank.
    assert not replace(BASE, lora_rank=513, engine_type="vllm").sends_adapter_only
    assert not BASE.sends_adapter_only


def test_the_last_batch_of_an_epoch_is_kept_or_dropped_as_asked():
    def steps(**changes):
        strategy = FSDPV2Strategy(replace(BASE, rollout_batch_size=4, **changes))
        strategy.data = SimpleNamespace(rank=0, size=2)
        sampler = _sampler(strategy.config, strategy, range(10))
        first, second = (list(sampler.epoch_batches()) for _ in range(2))
        assert first != second
        resumed = _sampler(strategy.config, strategy, range(10))
        resumed.load_state_dict(sampler.state_dict())
        assert resumed.next_batch() == sampler.next_batch()
        return [len(batch) for batch in first]

    # Two of ten prompts are left over after two batches of four, one for each of two ranks.
    assert steps() == [2, 2, 1]
    assert steps(drop_last=True) == [2, 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_sync": "adapter"}, "lora_sync is adapter and lora_rank is 0"),
        ({"drop_last": True, "blend": ("a.jsonl", "b.jsonl")}, "drop_last and blend"),
        ({"lowest_group_score": 0.1}, "lowest_group_score 0.1 and dynamic_sampling off"),
        (
            {"dynamic_sampling": True, "lowest_group_score": 0.8, "highest_group_score": 0.1},
            "lowest_group_score is 0.8 and highest_group_score is 0.1",
        ),
        ({"dynamic_sampling": True, "partial_rollout_tokens": 4}, "dynamic_sampling and partial_rollout_tokens 4"),
        ({"first_token_temperature": 2.0, "partial_rollout_tokens": 4}, "first_token_temperature 2.0 and partial"),
        ({"first_token_temperature": -1.0}, "first_token_temperature is -1.0"),
        ({"packing": True, "share_prompts": True}, "packing and share_prompts"),
        ({"packing": True, "padding_side": "left"}, "packing and padding_side left"),
        ({"kl_in_reward": True}, "kl_in_reward and init_kl_coef 0"),
        ({"kl_target": 0.1}, "kl_target and init_kl_coef 0"),
        ({"init_kl_coef": 0.1, "kl_target": -1.0}, "kl_target is -1.0"),
        ({"importance_floor": 3.0, "importance_sampling": "mask"}, "importance_floor is 3.0"),
        ({"importance_floor": 0.5}, "importance_sampling 'off'"),
        ({"gap_warn": 0.5, "gap_stop": 0.1}, "gap_warn and gap_stop"),
        ({"value_clip": 0.0}, "value_clip is 0.0"),
        ({"critic_warmup_steps": 4}, "critic_warmup_steps is 4 and max_steps is 4"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0"),
        ({"high_entropy_ratio": 0.0}, "high_entropy_ratio is 0"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"reward_clip": -1.0}, "reward_clip is -1.0"),
    ],
)
def test_what_cannot_work_is_refused_with_its_names(changes, words):
    with pytest.raises(ConfigurationError, match=words):
        replace(BASE, **changes)


def test_a_policy_loss_keeps_its_own_clip_unless_one_is_given():
    own = PolicyLoss.get("gspo").resolve(RFTConfig(policy_loss="gspo").loss_options())
    assert (own["clip_low"], own["clip_high"]) == (3e-4, 4e-4)
    given = PolicyLoss.get("ppo").resolve(RFTConfig(eps_clip=0.1).loss_options())
    assert (given["clip_low"], given["clip_high"]) == (0.1, 0.1)


def test_every_setting_is_read_where_something_is_built():
    """The rest is read by name in the package or its app; a setting that nothing reads is a defect."""
    root = Path(__file__).parents[3]
    files = [*root.glob("packages/rft-trainer/src/**/*.py"), *root.glob("apps/gsm8k/**/*.py")]
    text = "\n".join(file.read_text() for file in files if file.name != "config.py")
    unread = [
        item.name
        for item in fields(RFTConfig)
        if item.name not in {*OPTIMIZER, *UPDATE, *WARM_START, *ADAPTERS, *CREDIT, *TOGETHER}
        and f"config.{item.name}" not in text
        and f"args.{item.name}" not in text
    ]
    assert unread == []
