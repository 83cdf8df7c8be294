import math

import pytest
import torch
from torch.testing import assert_close

from rft_trainer.algorithms import LossInputs, LossOptions, PolicyLoss, policy_loss
from rft_trainer.errors import ConfigurationError

NAMES = [
    "cispo",
    "clip_higher",
    "cpgd",
    "dual_clip",
    "gmpo",
    "gspo",
    "gspo_token",
    "ppo",
    "reinforce",
    "sapo",
]


def _one(kind, log_ratio, advantage, options=None):
    """(loss, gradient at the log-prob) of one token whose old log-prob is -1."""
    log_probs = torch.tensor([[-1.0 + log_ratio]], requires_grad=True)
    outputs = policy_loss(
        log_probs, torch.tensor([[-1.0]]), torch.tensor([[advantage]]), torch.ones(1, 1), kind=kind, options=options
    )
    outputs.loss.sum().backward()
    return outputs.loss.item(), log_probs.grad.item()


def test_names():
    assert PolicyLoss.names() == NAMES


def test_unknown_name_lists_the_names():
    with pytest.raises(ConfigurationError, match=r"'vespo'.*cispo, clip_higher"):
        PolicyLoss.get("vespo")


@pytest.mark.parametrize(
    ("kind", "ratio", "advantage", "loss", "gradient"),
    [
        ("ppo", 1.5, 1.0, -1.2, 0.0),
        ("ppo", 0.5, 1.0, -0.5, -0.5),
        ("ppo", 1.5, -1.0, 1.5, 1.5),
        ("ppo", 0.5, -1.0, 0.8, 0.0),
        ("clip_higher", 1.5, 1.0, -1.28, 0.0),
        ("clip_higher", 0.5, -1.0, 0.8, 0.0),
        ("dual_clip", 4.0, -1.0, 3.0, 0.0),
        ("dual_clip", 2.0, -1.0, 2.0, 2.0),
        ("dual_clip", 4.0, 1.0, -1.2, 0.0),
        ("cispo", 2.0, 1.0, -2.0 * (-1 + math.log(2.0)), -2.0),
        ("cispo", 9.0, -1.0, 5.0 * (-1 + math.log(9.0)), 5.0),
        # 4 sigmoid(1) and its slope 4 s (1 - s) r at r = 2, tau = 1
        ("sapo", 2.0, 1.0, -4 * 0.7310585786, -4 * 0.7310585786 * 0.2689414214 * 2),
        # A < 0: tau 1.05
        ("sapo", 1.0, -1.0, 2 / 1.05, 1.0),
        ("reinforce", 1.5, 2.0, -2.0 * (-1 + math.log(1.5)), -2.0),
    ],
)
def test_one_token(kind, ratio, advantage, loss, gradient):
    assert _one(kind, math.log(ratio), advantage) == pytest.approx((loss, gradient), abs=1e-5)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [(0.5, 1.0, -0.182322, 0.0), (-0.5, -1.0, -0.223144, 0.0), (0.1, 1.0, -0.1, -1.0), (0.5, -1.0, 0.5, 1.0)],
)
def test_cpgd(log_ratio, advantage, loss, gradient):
    assert _one("cpgd", log_ratio, advantage) == pytest.approx((loss, gradient), abs=1e-5)


def test_cpgd_drift_has_the_value_of_k3_and_a_capped_slope():
    options = LossOptions(drift_coef=2.0, drift_cap=0.2)
    loss, gradient = _one("cpgd", 0.5, 1.0, options)
    assert loss == pytest.approx(-0.182322 + 2 * (math.exp(0.5) - 1 - 0.5), abs=1e-5)
    assert gradient == pytest.approx(2 * 0.2, abs=1e-6)
    loss, gradient = _one("cpgd", -0.5, 0.0, options)
    assert gradient == pytest.approx(2 * (math.exp(-0.5) - 1), abs=1e-6)


def test_sequence_losses_use_only_unmasked_cells():
    log_ratio = torch.tensor([[0.2, 0.4, 9.0, math.nan]])
    advantages = torch.tensor([[2.0, 4.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0, 0]])
    wide = LossOptions(clip_low=0.9, clip_high=9.0)
    for kind, expected in (("gspo", -3 * 1.349859), ("gmpo", -3 * 1.349859)):
        loss = policy_loss(log_ratio, torch.zeros(1, 4), advantages, mask, kind=kind, options=wide).loss
        assert_close(loss, torch.tensor([[expected, expected, 0.0, 0.0]]), atol=1e-5, rtol=0)


def test_gspo_clips_the_whole_response():
    log_probs = torch.tensor([[0.2, 0.4]], requires_grad=True)
    outputs = policy_loss(log_probs, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), kind="gspo")
    outputs.loss.sum().backward()
    assert_close(outputs.loss.detach(), torch.full((1, 2), -1.0004))
    assert log_probs.grad.tolist() == [[0.0, 0.0]]
    assert outputs.metrics["clip_fraction"].mean == 1.0


def test_gspo_token_equals_gspo_for_one_advantage_per_response():
    gradients = []
    for kind in ("gspo", "gspo_token"):
        log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -7.0]], requires_grad=True)
        old = torch.tensor([[-1.1, -1.9, -3.2], [-1.2, -0.9, 0.0]])
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        advantages = torch.tensor([[0.7], [-0.4]]).expand(2, 3)
        options = LossOptions(clip_low=0.5, clip_high=0.5)
        loss = policy_loss(log_probs, old, advantages, mask, kind=kind, options=options).loss
        (loss.sum(dim=1) / mask.sum(dim=1)).mean().backward()
        gradients.append(log_probs.grad)
    assert gradients[0].abs().max() > 0
    assert_close(gradients[0], gradients[1])


def test_gmpo_clips_tokens_in_log_space_on_the_side_of_the_advantage():
    log_probs = torch.tensor([[1.0, -1.0]], requires_grad=True)
    outputs = policy_loss(log_probs, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), kind="gmpo")
    outputs.loss.mean().backward()
    ratio = math.exp((0.4 - 1.0) / 2)
    assert_close(outputs.loss.detach(), torch.full((1, 2), -ratio))
    assert_close(log_probs.grad, torch.tensor([[0.0, -ratio / 2]]))
    negative = policy_loss(log_probs, torch.zeros(1, 2), -torch.ones(1, 2), torch.ones(1, 2), kind="gmpo")
    assert_close(negative.loss.detach(), torch.full((1, 2), math.exp((1.0 - 0.4) / 2)))


@pytest.mark.parametrize("kind", NAMES)
def test_on_policy_gradient_is_the_policy_gradient(kind):
    # with old = new every loss has the gradient -A at each token (of the row mean for losses of whole responses)
    log_probs = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.1, -9.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages = torch.tensor([[0.5], [-1.5]]).expand(2, 3)
    policy_loss(log_probs, None, advantages, mask, kind=kind).loss.sum().backward()
    assert_close(log_probs.grad, -advantages * mask)


@pytest.mark.parametrize("kind", NAMES)
def test_masked_cells_change_nothing(kind):
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
    cells = [torch.randn(3, 4, generator=generator) for _ in range(3)]
    results = []
    for filler in (0.0, 50.0, math.nan, math.inf):
        log_probs, old, advantages = (torch.where(mask.bool(), cell, filler) for cell in cells)
        log_probs.requires_grad_()
        outputs = policy_loss(log_probs, old, advantages, mask, kind=kind)
        outputs.loss.sum().backward()
        results.append((outputs.loss.detach(), log_probs.grad, outputs.metrics["ratio"].total))
    for loss, gradient, ratio in results:
        assert loss.equal(results[0][0])
        assert gradient.equal(results[0][1])
        assert ratio.equal(results[0][2])
        assert loss[mask == 0].eq(0).all()
        assert gradient[mask == 0].eq(0).all()


@pytest.mark.parametrize("kind", NAMES)
def test_old_log_probs_of_none_are_the_detached_forward(kind):
    results = []
    for is_given in (True, False):
        log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        old = log_probs.detach().clone() if is_given else None
        outputs = policy_loss(log_probs, old, torch.tensor([[0.3, -0.2]]), torch.ones(1, 2), kind=kind)
        outputs.loss.sum().backward()
        results.append((outputs.loss.detach(), log_probs.grad))
    assert results[0][0].equal(results[1][0])
    assert results[0][1].equal(results[1][1])


def test_weights_multiply_the_loss_without_gradient():
    log_probs, weights = (
        torch.tensor([[-1.0, -2.0]], requires_grad=True),
        torch.tensor([[2.0, 0.0]], requires_grad=True),
    )
    outputs = policy_loss(log_probs, None, torch.ones(1, 2), torch.ones(1, 2), weights=weights)
    outputs.loss.sum().backward()
    assert outputs.loss.tolist() == [[-2.0, 0.0]]
    assert log_probs.grad.tolist() == [[-2.0, 0.0]]
    assert weights.grad is None


def test_weights_behind_the_mask_change_nothing():
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    weights = torch.tensor([[2.0, math.nan]])
    policy_loss(log_probs, None, torch.ones(1, 2), torch.tensor([[1, 0]]), weights=weights).loss.sum().backward()
    assert log_probs.grad.tolist() == [[-2.0, 0.0]]


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ratios_beyond_fp32_keep_the_gradient_finite(kind, log_ratio, advantage):
    loss, gradient = _one(kind, log_ratio, advantage)
    assert math.isfinite(loss)
    assert math.isfinite(gradient)


def test_advantages_get_no_gradient():
    advantages = torch.ones(1, 1, requires_grad=True)
    policy_loss(torch.zeros(1, 1, requires_grad=True), None, advantages, torch.ones(1, 1)).loss.sum().backward()
    assert advantages.grad is None


def test_metrics():
    log_probs = torch.tensor([[math.log(1.5), math.log(0.5), 0.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0]])
    metrics = policy_loss(log_probs, torch.zeros(1, 4), torch.ones(1, 4), mask).metrics
    assert metrics["clip_fraction"].mean == pytest.approx(1 / 3)
    assert metrics["ratio"].mean == pytest.approx(1.0)
    assert metrics["ratio_max"].value.item() == pytest.approx(1.5)
    assert metrics["kl_old_new"].mean == pytest.approx((0.5 - math.log(1.5) - 0.5 - math.log(0.5)) / 3, abs=1e-6)
    assert not metrics["ratio"].total.requires_grad


def test_options_a_loss_does_not_read_are_refused():
    with pytest.raises(ConfigurationError, match=r"'gspo' does not read dual_clip.*clip_high, clip_low"):
        PolicyLoss.get("gspo").resolve(LossOptions(dual_clip=3.0))
    with pytest.raises(ConfigurationError, match="'reinforce' does not read clip_low; it reads no option"):
        PolicyLoss.get("reinforce").resolve(LossOptions(clip_low=0.2))
    assert PolicyLoss.get("ppo").resolve(LossOptions(clip_high=0.3)) == {
        "clip_low": 0.2,
        "clip_high": 0.3,
        "dual_clip": None,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [({"clip_low": -0.1}, "clip_low"), ({"dual_clip": 1.0}, "dual_clip"), ({"tau_positive": 0.0}, "tau_positive")],
)
def test_options_out_of_range_name_themselves(options, message):
    with pytest.raises(ConfigurationError, match=message):
        LossOptions(**options)


def test_every_option_changes_its_loss():
    generator = torch.Generator().manual_seed(5)
    log_probs, old, advantages = (torch.randn(64, 6, generator=generator) * 0.8 for _ in range(3))
    changed = {"clip_low": 0.05, "clip_high": 0.05, "dual_clip": 1.5, "tau_positive": 3.0, "tau_negative": 3.0}
    changed |= {"drift_coef": 1.0, "drift_cap": 0.01}
    for name in NAMES:
        for option in PolicyLoss.get(name).defaults:
            results = []
            for extra in ({}, {option: changed[option]}):
                if option == "drift_cap":
                    extra = extra | {"drift_coef": 1.0}
                leaf = log_probs.clone().requires_grad_()
                loss = policy_loss(
                    leaf, old, advantages, torch.ones(64, 6), kind=name, options=LossOptions(**extra)
                ).loss
                loss.sum().backward()
                results.append((loss.detach(), leaf.grad))
            same = all(one.equal(other) for one, other in zip(*results, strict=True))
            assert not same, f"{name}: {option} changes nothing"


def test_shapes_are_checked_when_inputs_are_made():
    cells = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"old_log_probs \(1, 3\)"):
        LossInputs(log_probs=cells, old_log_probs=torch.zeros(1, 3), advantages=cells, mask=cells)


def test_low_precision_inputs_are_computed_in_fp32():
    log_probs = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    outputs = policy_loss(log_probs, None, torch.ones(1, 2), torch.ones(1, 2))
    assert outputs.loss.dtype == torch.float32


def test_own_loss_can_be_registered_once(monkeypatch):
    monkeypatch.setattr(PolicyLoss, "_registry", dict(PolicyLoss._registry))
    entry = PolicyLoss(name="mine", defaults={}, paper="none", compute=PolicyLoss.get("reinforce").compute)
    PolicyLoss.register(entry)
    assert _one("mine", 0.0, 1.0) == pytest.approx((1.0, -1.0))
    with pytest.raises(ConfigurationError, match="already registered"):
        PolicyLoss.register(entry)
