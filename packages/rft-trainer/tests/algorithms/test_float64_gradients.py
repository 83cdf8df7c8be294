"""Value and gradient of every policy loss and divergence against its formula in float64, taken row by row.

Rows have holes, no token or one; ratios reach e^-90 and e^60; masked cells hold what must never be read.
"""

import math
import warnings

import pytest
import torch

from rft_trainer.algorithms import KL_KINDS, PolicyLoss, kl_estimate, policy_loss

ROWS, COLUMNS, TRIALS = 6, 7, 20
SPREADS = (0.3, 5.0, 20.0)
"""Deviation of the log-ratio, nats."""


def clipped(ratio, advantages, low, high):
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def dual(ratio, advantages):
    plain = clipped(ratio, advantages, 0.2, 0.2)
    return torch.where(advantages < 0, torch.minimum(plain, -3 * advantages), plain)


def soft(ratio, advantages):
    tau = torch.where(advantages > 0, 1.0, 1.05)
    return -advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))


def geometric(log_ratio, advantages):
    mean = advantages.mean()
    bound = log_ratio.clamp(max=0.4) if mean > 0 else log_ratio.clamp(min=-0.4)
    return (-mean * bound.mean().exp()).expand_as(log_ratio)


FORMULAS = {
    "ppo": lambda p, d, a: clipped(d.exp(), a, 0.2, 0.2),
    "clip_higher": lambda p, d, a: clipped(d.exp(), a, 0.2, 0.28),
    "dual_clip": lambda p, d, a: dual(d.exp(), a),
    "cpgd": lambda p, d, a: -torch.minimum(d * a, d.clamp(math.log(0.8), math.log(1.2)) * a),
    "gspo": lambda p, d, a: clipped(d.mean().exp(), a.mean(), 3e-4, 4e-4).expand_as(d),
    "gspo_token": lambda p, d, a: clipped(d.mean().exp().detach() * (p - p.detach()).exp(), a, 3e-4, 4e-4),
    "gmpo": lambda p, d, a: geometric(d, a),
    "cispo": lambda p, d, a: -d.exp().detach().clamp(max=5) * a * p,
    "sapo": lambda p, d, a: soft(d.exp(), a),
    "reinforce": lambda p, d, a: -a * p,
}
SLOPES = {
    "k1": (lambda d: d, torch.ones_like),
    "k2": (lambda d: d**2 / 2, lambda d: d),
    "k3": (lambda d: torch.exp(-d) - 1 + d, lambda d: 1 - torch.exp(-d)),
    "abs": (torch.abs, torch.sign),
}


def exact_and_found(formula, compute, log_probs, others, mask):
    """((loss, gradient) in float64 by row, those of the package in fp32 with its masked cells spoilt)."""
    exact = log_probs.double().requires_grad_()
    loss = torch.zeros(mask.shape, dtype=torch.float64)
    for row, present in enumerate(mask):
        if present.any():
            loss[row, present] = formula(exact[row, present], *(t[row, present].double() for t in others))
    found = log_probs.masked_fill(~mask, math.nan).requires_grad_()
    got = compute(found, *(t.masked_fill(~mask, math.inf) for t in others))
    gradients = torch.autograd.grad(loss.sum(), exact)[0], torch.autograd.grad(got.sum(), found)[0]
    return (loss.detach(), gradients[0]), (got.detach(), gradients[1])


def assert_close(exact, found):
    for right, got in zip(exact, found, strict=True):
        assert ((got.double() - right).abs() <= 2e-5 * (1 + right.abs())).all()


def cases(spread):
    generator = torch.Generator().manual_seed(int(10 * spread))
    for _ in range(TRIALS):
        mask = torch.rand(ROWS, COLUMNS, generator=generator) < 0.6
        mask[0] = False
        mask[1] = torch.arange(COLUMNS) == 3
        log_probs, noise, advantages = torch.randn(3, ROWS, COLUMNS, generator=generator)
        # above e^60 the ratio is bounded
        yield log_probs - 3, log_probs - 3 - (spread * noise).clamp(max=59), advantages, mask


def test_every_loss_has_a_formula_here():
    assert sorted(FORMULAS) == sorted(PolicyLoss.names())


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kind", FORMULAS)
def test_a_policy_loss_and_its_gradient(kind, spread):
    for log_probs, old, advantages, mask in cases(spread):
        assert_close(
            *exact_and_found(
                lambda p, o, a: FORMULAS[kind](p, p - o, a),
                lambda p, o, a, present=mask: policy_loss(p, o, a, present, kind=kind).loss,
                log_probs,
                (old, advantages),
                mask,
            )
        )


@pytest.mark.parametrize("kind", ["cpgd", "gspo", "gmpo"])
def test_a_token_that_all_but_vanished_counts_in_full(kind):
    """Bounding its log-ratio would change the mean of the row, and cpgd's loss itself."""
    old = torch.full((1, 30), -1.0)
    log_probs = torch.cat([torch.tensor([[-91.0]]), old[:, 1:]], dim=1)
    for sign in (1.0, -1.0):
        assert_close(
            *exact_and_found(
                lambda p, o, a: FORMULAS[kind](p, p - o, a),
                lambda p, o, a: policy_loss(p, o, a, torch.ones(1, 30), kind=kind).loss,
                log_probs,
                (old, torch.full((1, 30), sign)),
                torch.ones(1, 30, dtype=torch.bool),
            )
        )


@pytest.mark.parametrize("kind", KL_KINDS)
def test_a_divergence_and_its_gradient(kind):
    value, _, slope = kind.partition("+")
    for log_probs, reference, _, mask in cases(1.0):
        d = (log_probs.double() - reference.double()) * mask
        found = log_probs.masked_fill(~mask, math.nan).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = kl_estimate(found, reference.masked_fill(~mask, -math.inf), kind, mask)
        (gradient,) = torch.autograd.grad(got.sum(), found)
        exact = SLOPES[value][0](d) * mask, SLOPES[slope or value][1](d) * mask
        assert_close(exact, (got.detach(), gradient))
