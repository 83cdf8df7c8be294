"""Every setting reaches something: what a component is built from differs when the setting differs."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from rft_trainer.algorithms import PolicyLoss
from rft_trainer.config import RFTConfig
from rft_trainer.session import update_config

BASE = RFTConfig(lr_scheduler="linear", lr_warmup_steps=1, max_steps=4, n_samples_per_prompt=4)

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
    "kl_estimator": "k2",
    "train_batch_size": 8,
    "share_prompts": True,
    "seed": 9,
}
ADAPTERS = {"lora_rank": 2, "lora_alpha": 3.0, "lora_targets": ("q_proj",), "seed": 9}


@pytest.mark.parametrize("name", OPTIMIZER)
def test_the_optimiser_is_built_from(name):
    assert replace(BASE, **{name: OPTIMIZER[name]}).actor_optimizer() != BASE.actor_optimizer()


@pytest.mark.parametrize("name", UPDATE)
def test_the_update_is_built_from(name):
    assert update_config(replace(BASE, **{name: UPDATE[name]}), 2) != update_config(BASE, 2)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_built_from(name):
    base = replace(BASE, lora_rank=4)
    other = replace(base, **{name: ADAPTERS[name]})
    assert other.adapters(other.seed) != base.adapters(base.seed)


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
        if item.name not in {*OPTIMIZER, *UPDATE, *ADAPTERS}
        and f"config.{item.name}" not in text
        and f"args.{item.name}" not in text
    ]
    assert unread == []
