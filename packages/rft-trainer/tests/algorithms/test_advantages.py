import pytest
import torch
from torch.testing import assert_close

from rft_trainer.algorithms import AdvantageEstimator, AdvantageInputs, Moments, gae, group_norm, rloo
from rft_trainer.errors import ConfigurationError

NAMES = [
    "cpgd",
    "dr_grpo",
    "gae",
    "group_mean",
    "group_norm",
    "grpo",
    "on_policy_distillation",
    "reinforce",
    "reinforce++",
    "reinforce++_baseline",
    "reinforce_baseline",
    "rloo",
]
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 0, 1]])
SCORES = torch.tensor([1.0, 0.0, 0.0, 1.0])


def _inputs(**changes):
    given = {"rewards": SCORES, "mask": MASK, "group_size": 4, "values": torch.full((4, 3), 0.25)}
    given |= {"log_probs": torch.full((4, 3), -1.0), "teacher_log_probs": torch.full((4, 3), -0.5)}
    return AdvantageInputs(**(given | changes))


def test_names():
    assert AdvantageEstimator.names() == NAMES


def test_unknown_name_lists_the_names():
    with pytest.raises(ConfigurationError, match=r"'gppo'.*cpgd, dr_grpo, gae"):
        AdvantageEstimator.get("gppo")


@pytest.mark.parametrize("name", NAMES)
def test_uniform_call(name):
    outputs = AdvantageEstimator.get(name)(_inputs())
    assert outputs.advantages.shape == (4, 3)
    assert outputs.advantages.dtype == torch.float32
    assert outputs.advantages[MASK == 0].eq(0).all()
    assert outputs.advantages.isfinite().all()
    assert outputs.advantages.abs().max() > 0
    assert (outputs.returns is not None) == (name == "gae")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group_norm", [0.866024, -0.866024, -0.866024, 0.866024]),
        ("grpo", [0.866024, -0.866024, -0.866024, 0.866024]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5]),
        ("group_mean", [0.5, -0.5, -0.5, 0.5]),
        ("cpgd", [0.5, -0.5, -0.5, 0.5]),
        ("reinforce_baseline", [0.5, -0.5, -0.5, 0.5]),
        ("reinforce++_baseline", [0.5, -0.5, -0.5, 0.5]),
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("reinforce", [1.0, 0.0, 0.0, 1.0]),
        ("reinforce++", [1.0, 0.0, 0.0, 1.0]),
    ],
)
def test_scores_reach_every_token_of_their_row(name, expected):
    advantages = AdvantageEstimator.get(name)(_inputs()).advantages
    assert_close(advantages, torch.tensor(expected)[:, None] * MASK, atol=1e-6, rtol=0)


def test_gae_entry_is_the_function():
    inputs = _inputs(gamma=0.9, lam=0.8, kl_penalty=torch.full((4, 3), 0.1))
    rewards = torch.tensor([[0, 1.0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1]]) - 0.1
    outputs = AdvantageEstimator.get("gae")(inputs)
    advantages, returns = gae(rewards, inputs.values, MASK, 0.9, 0.8)
    assert_close(outputs.advantages, advantages)
    assert_close(outputs.returns, returns)


def test_penalty_and_discount_work_in_every_estimator_without_critic():
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0]),
        mask=torch.tensor([[1, 1, 0], [1, 1, 1]]),
        group_size=2,
        kl_penalty=torch.tensor([[0.1, 0.2, 9.0], [0.0, 0.0, 0.1]]),
        gamma=0.5,
    )
    advantages = AdvantageEstimator.get("group_mean")(inputs).advantages
    # row 0: -0.1 + 0.5 * (0.5 - 0.2), 0.5 - 0.2; row 1: score -0.5 - 0.1 on the third token
    assert_close(advantages, torch.tensor([[0.05, 0.3, 0.0], [-0.15, -0.3, -0.6]]))


def test_step_rewards_keep_their_place_and_share_the_group_baseline():
    rewards = torch.tensor([[0.2, 0.0, 0.8], [0.0, 0.5, 0.0]])
    inputs = AdvantageInputs(rewards=rewards, mask=torch.ones(2, 3), group_size=2)
    assert inputs.outcomes.tolist() == [1.0, 0.5]
    advantages = AdvantageEstimator.get("group_mean")(inputs).advantages
    assert_close(advantages, torch.tensor([[0.25, 0.05, 0.05], [-0.25, -0.25, -0.75]]))
    # the first token sees the whole response, as with one score per response
    for name, function in (("rloo", rloo), ("group_norm", group_norm)):
        first = AdvantageEstimator.get(name)(inputs).advantages[:, 0]
        assert_close(first, function(inputs.outcomes, 2))


def test_equal_outcomes_by_different_steps_give_zero():
    rewards = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    inputs = AdvantageInputs(rewards=rewards, mask=torch.ones(2, 2), group_size=2)
    assert AdvantageEstimator.get("grpo")(inputs).advantages.eq(0).all()


def test_batch_scale_of_group_norm_is_passed_on():
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]), mask=torch.ones(4, 1), group_size=2, scale="batch", eps=1e-4
    )
    advantages = AdvantageEstimator.get("grpo")(inputs).advantages[:, 0]
    assert_close(advantages, torch.tensor([0.9998, -0.9998, 0, 0]), atol=5e-6, rtol=0)
    wider = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0]),
        mask=torch.ones(2, 1),
        group_size=2,
        scale="batch",
        std="population",
        moments=Moments.of(torch.tensor([0.0, 4.0])),
    )
    assert_close(AdvantageEstimator.get("grpo")(wider).advantages[:, 0], torch.tensor([0.25, -0.25]), atol=1e-6, rtol=0)


def test_distillation_is_the_gap_to_the_teacher_plus_the_group():
    log_probs, teacher = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-0.5, -3.0]])
    inputs = AdvantageInputs(
        rewards=torch.zeros(1),
        mask=torch.tensor([[1, 1]]),
        log_probs=log_probs,
        teacher_log_probs=teacher,
        distillation_coef=2.0,
    )
    assert AdvantageEstimator.get("on_policy_distillation")(inputs).advantages.tolist() == [[1.0, -2.0]]
    with_rewards = AdvantageEstimator.get("on_policy_distillation")(_inputs(distillation_coef=0.0)).advantages
    assert_close(with_rewards, AdvantageEstimator.get("grpo")(_inputs()).advantages)


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_one_are_refused_where_a_group_is_needed(name):
    entry = AdvantageEstimator.get(name)
    if entry.needs_group:
        with pytest.raises(ConfigurationError, match=f"{name.replace('+', '[+]')}.*n_samples_per_prompt"):
            entry.check(group_size=1)
    else:
        entry.check(group_size=1)
    entry.check(group_size=2)
    assert entry(_inputs(group_size=1)).advantages.isfinite().all()


def test_missing_critic_and_teacher_are_named():
    with pytest.raises(ConfigurationError, match="'gae' needs a critic"):
        AdvantageEstimator.get("gae")(_inputs(values=None))
    with pytest.raises(ConfigurationError, match="teacher_log_probs"):
        AdvantageEstimator.get("on_policy_distillation")(_inputs(teacher_log_probs=None))
    with pytest.raises(ConfigurationError, match="log_probs and teacher"):
        AdvantageEstimator.get("on_policy_distillation")(_inputs(log_probs=None))


def test_shapes_are_checked_when_inputs_are_made():
    with pytest.raises(ValueError, match=r"rewards \(3,\)"):
        _inputs(rewards=torch.zeros(3))
    with pytest.raises(ValueError, match=r"kl_penalty \(4, 2\)"):
        _inputs(kl_penalty=torch.zeros(4, 2))


def test_advantages_carry_no_graph():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], requires_grad=True)
    assert not AdvantageEstimator.get("grpo")(_inputs(rewards=rewards)).advantages.requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_order_of_whole_groups_changes_nothing(name):
    generator = torch.Generator().manual_seed(1)
    rewards = torch.rand(6, generator=generator)
    rest = {
        key: torch.rand(6, 4, generator=generator) for key in ("values", "kl_penalty", "log_probs", "teacher_log_probs")
    }
    mask = torch.rand(6, 4, generator=generator) > 0.3
    order = torch.tensor([4, 5, 0, 1, 2, 3])
    plain = AdvantageEstimator.get(name)(AdvantageInputs(rewards=rewards, mask=mask, group_size=2, gamma=0.9, **rest))
    moved = AdvantageEstimator.get(name)(
        AdvantageInputs(
            rewards=rewards[order],
            mask=mask[order],
            group_size=2,
            gamma=0.9,
            **{key: value[order] for key, value in rest.items()},
        )
    )
    assert_close(moved.advantages, plain.advantages[order])


def test_own_estimator_can_be_registered_once(monkeypatch):
    monkeypatch.setattr(AdvantageEstimator, "_registry", dict(AdvantageEstimator._registry))
    entry = AdvantageEstimator(name="mine", paper="none", compute=AdvantageEstimator.get("reinforce").compute)
    AdvantageEstimator.register(entry)
    assert AdvantageEstimator.get("mine") is entry
    with pytest.raises(ConfigurationError, match="already registered"):
        AdvantageEstimator.register(entry)


def test_the_order_of_equal_step_rewards_is_no_spread():
    """Sums in fp32 differ by rounding with the order, and advantages divided by that reached 1e7."""
    generator = torch.Generator().manual_seed(1)
    apart = 0
    for _ in range(100):
        steps = (50 * torch.rand(9, generator=generator)).round(decimals=1)
        rewards = torch.zeros(2, 120)
        for row in rewards:
            row[torch.randperm(120, generator=generator)[:9]] = steps[torch.randperm(9, generator=generator)]
        apart += int(rewards.sum(1).unique().numel() > 1)
        inputs = AdvantageInputs(rewards=rewards, mask=torch.ones(2, 120), group_size=2)
        for name in ("grpo", "rloo", "group_mean"):
            assert not AdvantageEstimator.get(name)(inputs).advantages.any(), name
    assert apart > 5
