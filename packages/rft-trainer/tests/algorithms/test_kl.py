import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rft_trainer.algorithms import KL_KINDS, AdaptiveKL, FixedKL, check_kl_kind, kl_estimate, kl_loss
from rft_trainer.errors import ConfigurationError

VALUES = {"k1": 0.5, "k2": 0.125, "k3": 0.106531, "abs": 0.5}
SWAPPED = {"k1": -0.5, "k2": 0.125, "k3": 0.148721, "abs": 0.5}
GRADIENTS = {"k1": 1.0, "k2": 0.5, "k3": 0.393469, "abs": 1.0}


def _pair(log_p, log_q):
    return torch.tensor([[log_p]], requires_grad=True), torch.tensor([[log_q]])


@pytest.mark.parametrize("kind", VALUES)
def test_value_and_gradient(kind):
    log_p, log_q = _pair(-1.0, -1.5)
    estimate = kl_estimate(log_p, log_q, kind)
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(VALUES[kind], abs=1e-6)
    assert log_p.grad.item() == pytest.approx(GRADIENTS[kind], abs=1e-6)
    assert kl_estimate(*_pair(-1.5, -1.0), kind).item() == pytest.approx(SWAPPED[kind], abs=1e-6)
    assert kl_estimate(*_pair(-2.0, -2.0), kind).item() == 0.0


@pytest.mark.parametrize("kind", [kind for kind in KL_KINDS if "+" in kind])
def test_straight_through_has_the_value_of_one_and_the_gradient_of_the_other(kind):
    value, gradient = kind.split("+")
    log_p, log_q = _pair(-1.0, -1.5)
    estimate = kl_estimate(log_p, log_q, kind)
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(VALUES[value], abs=1e-6)
    assert log_p.grad.item() == pytest.approx(GRADIENTS[gradient], abs=1e-6)


def test_masked_cells_are_zero_whatever_they_hold():
    log_p = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    estimate = kl_estimate(log_p, torch.tensor([[-1.5, -3.0]]), "k3", torch.tensor([[1, 0]]))
    estimate.sum().backward()
    assert_close(estimate.detach(), torch.tensor([[0.106531, 0.0]]), atol=1e-6, rtol=0)
    assert_close(log_p.grad, torch.tensor([[0.393469, 0.0]]), atol=1e-6, rtol=0)


def test_unknown_kind_lists_the_names():
    with pytest.raises(ConfigurationError, match=r"'k4'.*k1, k2, k3, abs"):
        check_kl_kind("k4")
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "low_var_kl")


def test_shapes_that_differ_raise():
    with pytest.raises(ValueError, match=r"log_probs \(1, 2\), ref_log_probs \(1, 3\)"):
        kl_estimate(torch.zeros(1, 2), torch.zeros(1, 3), "k1")


@pytest.mark.parametrize("kind", ["k1", "k3+k1"])
def test_k1_as_a_loss_warns(kind):
    with pytest.warns(UserWarning, match="mean zero"):
        kl_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), kind=kind)


def test_other_losses_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("k2", "k3", "k3+k2", "k1+k2"):
            kl_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), kind=kind)


def test_mean_gradients_are_those_of_the_divergences():
    # over three actions: sum_a p(a) * d/dtheta k2(a), with p held fixed, equals d/dtheta KL(p || q)
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    reference = torch.tensor([0.1, 0.5, -0.4]).log_softmax(0)
    log_p = logits.log_softmax(0)
    exact = torch.autograd.grad((log_p.exp() * (log_p - reference)).sum(), logits, retain_graph=True)[0]
    probabilities = log_p.exp().detach()
    sampled = (probabilities * kl_estimate(log_p[None], reference[None], "k2")[0]).sum()
    assert_close(torch.autograd.grad(sampled, logits, retain_graph=True)[0], exact)
    reverse = (probabilities * kl_estimate(log_p[None], reference[None], "k3")[0]).sum()
    backward = (reference.exp() * (reference - log_p)).sum()
    assert_close(
        torch.autograd.grad(reverse, logits, retain_graph=True)[0],
        torch.autograd.grad(backward, logits, retain_graph=True)[0],
    )
    dead = (probabilities * kl_estimate(log_p[None], reference[None], "k1")[0]).sum()
    assert_close(torch.autograd.grad(dead, logits)[0], torch.zeros(3), atol=1e-7, rtol=0)


@settings(deadline=None, max_examples=200)
@given(st.floats(-60, 60), st.floats(-60, 60))
def test_k3_and_k2_are_never_negative(log_p, log_q):
    for kind in ("k2", "k3", "abs"):
        assert kl_estimate(torch.tensor([[log_p]]), torch.tensor([[log_q]]), kind).item() >= 0


def test_adaptive_coefficient_stays_positive_and_outlives_a_step_without_a_number():
    controller = AdaptiveKL(value=0.1, target=1.0, horizon_samples=100)
    controller.update(math.nan, 100)
    assert controller.value == 0.1
    controller.update(0.0, 1024)
    assert controller.value == pytest.approx(0.08)
    controller.update(math.inf, 50)
    assert controller.value == pytest.approx(0.088)


@pytest.mark.parametrize(("observed", "expected"), [(12.0, 0.0102048), (3.0, 0.0097952), (6.0, 0.01)])
def test_adaptive_coefficient(observed, expected):
    controller = AdaptiveKL(value=0.01, target=6.0, horizon_samples=10_000)
    controller.update(observed, 1024)
    assert controller.value == pytest.approx(expected, rel=1e-9)
    restored = AdaptiveKL(value=1.0, target=6.0, horizon_samples=10_000)
    restored.load_state_dict(controller.state_dict())
    assert restored.value == controller.value


def test_fixed_coefficient_stays():
    controller = FixedKL(0.01)
    controller.update(100.0, 1024)
    assert controller.value == 0.01


def test_adaptive_coefficient_refuses_a_target_of_zero():
    with pytest.raises(ConfigurationError, match=r"target 0\.0"):
        AdaptiveKL(value=0.01, target=0.0, horizon_samples=10_000)
