"""Every estimator, loss and aggregation against the written formula in float64, on ragged masks with holes."""

import math

import numpy as np
import pytest
import torch

from rft_trainer.algorithms import (
    AGGREGATION_MODES,
    AdvantageEstimator,
    AdvantageInputs,
    aggregate,
    high_entropy_mask,
    importance_weights,
    kl_estimate,
    loss_denominator,
    policy_loss,
    whiten,
)

TRIALS = 30


class Case:
    """Groups of random size; rows with holes, some of them without a token; rewards that often have no spread."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.size = int(rng.integers(2, 5))
        rows, columns = self.size * int(rng.integers(1, 4)), int(rng.integers(1, 8))
        self.mask = rng.random((rows, columns)) < 0.6
        self.gamma, self.lam = float(rng.choice([1.0, 0.9])), float(rng.choice([0.0, 0.5, 0.95, 1.0]))
        self.rewards = rng.choice([0.0, 1.0, 0.5, 0.3], size=rows)
        self.values, self.advantages = rng.normal(size=(2, rows, columns))
        self.kl = 0.1 * rng.normal(size=(rows, columns))
        self.log_probs, self.old = 0.5 * rng.normal(size=(2, rows, columns)) - 2
        self.counts = np.maximum(self.mask.sum(1, keepdims=True), 1)

    def row_mean(self, values):
        return (values * self.mask).sum(1, keepdims=True) / self.counts

    def on_last(self, scores):
        placed = np.zeros(self.mask.shape)
        for row, score in enumerate(scores):
            columns = np.flatnonzero(self.mask[row])
            placed[row, columns[-1:]] = score
        return placed

    def to_go(self, rewards):
        found = np.zeros(self.mask.shape)
        for row in range(len(rewards)):
            running = 0.0
            for column in np.flatnonzero(self.mask[row])[::-1]:
                running = found[row, column] = rewards[row, column] + self.gamma * running
        return found

    def gae(self, rewards):
        found = np.zeros(self.mask.shape)
        for row in range(len(rewards)):
            advantage = value = 0.0
            for column in np.flatnonzero(self.mask[row])[::-1]:
                delta = rewards[row, column] + self.gamma * value - self.values[row, column]
                advantage = found[row, column] = delta + self.gamma * self.lam * advantage
                value = self.values[row, column]
        return found

    def baselined(self):
        groups = self.rewards.reshape(-1, self.size)
        centred = groups - groups.mean(1, keepdims=True)
        others = (groups.sum(1, keepdims=True) - groups) / (self.size - 1)
        spread = (groups.max(1) != groups.min(1))[:, None]
        norm = centred / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
        named = {"group_mean": centred, "dr_grpo": centred, "rloo": groups - others, "grpo": norm}
        return {"reinforce": self.rewards, **{name: (found * spread).ravel() for name, found in named.items()}}

    def losses(self):
        log_ratio, a = self.log_probs - self.old, self.advantages
        ratio, ones = np.exp(log_ratio), np.ones(self.mask.shape)
        whole, mean = np.exp(self.row_mean(log_ratio)) * ones, self.row_mean(a) * ones
        bound = np.where(mean > 0, np.minimum(log_ratio, 0.4), np.maximum(log_ratio, -0.4))
        tau = np.where(a > 0, 1.0, 1.05)
        return {
            "ppo": clipped(ratio, a, 0.2, 0.2),
            "clip_higher": clipped(ratio, a, 0.2, 0.28),
            "dual_clip": np.where(a < 0, np.minimum(clipped(ratio, a, 0.2, 0.2), -3 * a), clipped(ratio, a, 0.2, 0.2)),
            "cpgd": -np.minimum(log_ratio * a, np.clip(log_ratio, math.log(0.8), math.log(1.2)) * a),
            "gspo": clipped(whole, mean, 3e-4, 4e-4),
            "gspo_token": clipped(whole, a, 3e-4, 4e-4),
            "gmpo": -mean * np.exp(self.row_mean(bound)),
            "cispo": -np.minimum(ratio, 5.0) * a * self.log_probs,
            "sapo": -a * 4 / tau / (1 + np.exp(-tau * (ratio - 1))),
            "reinforce": -a * self.log_probs,
        }


def clipped(ratio, advantages, low, high):
    return -np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)


def close(got, expected, name):
    np.testing.assert_allclose(np.asarray(got, dtype=np.float64), expected, atol=5e-6, rtol=0, err_msg=name)


def tensors(*arrays):
    return [torch.tensor(array) for array in arrays]


@pytest.fixture(params=range(TRIALS))
def case(request):
    return Case(request.param)


def test_estimators(case):
    rewards, mask, kl, values = tensors(case.rewards.astype(np.float32), case.mask, case.kl, case.values)
    common = {"rewards": rewards, "mask": mask, "group_size": case.size, "kl_penalty": kl, "gamma": case.gamma}
    for name, scores in case.baselined().items():
        got = AdvantageEstimator.get(name)(AdvantageInputs(**common)).advantages
        close(got, case.to_go(case.on_last(scores) - case.kl * case.mask), name)
    got = AdvantageEstimator.get("gae")(AdvantageInputs(**common, values=values, lam=case.lam))
    expected = case.gae(case.on_last(case.rewards) - case.kl * case.mask)
    close(got.advantages, expected, "gae")
    close(got.returns, (expected + case.values) * case.mask, "returns")


def test_losses(case):
    log_probs, old, advantages, mask = tensors(case.log_probs, case.old, case.advantages, case.mask)
    for name, expected in case.losses().items():
        close(policy_loss(log_probs, old, advantages, mask, kind=name).loss, expected * case.mask, name)


def test_divergences_weights_and_whitening(case):
    log_probs, old, advantages, mask = tensors(case.log_probs, case.old, case.advantages, case.mask)
    d = case.log_probs - case.old
    for name, expected in {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d, "abs": np.abs(d)}.items():
        close(kl_estimate(log_probs, old, name, mask), expected * case.mask, name)
    whole = np.exp((d * case.mask).sum(1, keepdims=True))
    got = importance_weights(log_probs, old, mask, level="sequence", cap=2.0)
    close(got, np.minimum(whole, 2.0) * case.mask, "sequence")
    got = importance_weights(log_probs, old, mask, cap=1.5, floor=0.7, mode="mask")
    kept = case.mask & (np.exp(d) >= 0.7) & (np.exp(d) <= 1.5)
    close(got, np.exp(d) * kept, "mask")
    chosen = case.advantages[case.mask]
    if len(chosen) > 1:
        close(whiten(advantages, mask)[mask], (chosen - chosen.mean()) / np.sqrt(chosen.var() + 1e-8), "whiten")


def test_aggregation_and_choice_of_tokens(case):
    loss, mask, entropy = tensors(case.advantages, case.mask, np.abs(case.values))
    kept, rows = case.advantages * case.mask, max(int(case.mask.any(1).sum()), 1)
    expected = {
        "token-mean": kept.sum() / max(int(case.mask.sum()), 1),
        "seq-mean-token-mean": (kept.sum(1) / case.counts[:, 0]).sum() / rows,
        "seq-mean-token-sum": kept.sum() / rows,
        "seq-mean-token-sum-norm": kept.sum() / (rows * 10),
    }
    for mode in AGGREGATION_MODES:
        denominator = loss_denominator(mask, mode, 10 if mode.endswith("norm") else None)
        close(aggregate(loss, mask, mode, denominator), expected[mode], mode)
        close(aggregate(loss, mask, mode, float(denominator)), expected[mode], mode)
    for row, chosen in enumerate(high_entropy_mask(entropy, mask, 0.3).numpy()):
        columns = np.flatnonzero(case.mask[row])
        order = columns[np.argsort(-np.abs(case.values[row, columns]), kind="stable")]
        assert sorted(order[: math.ceil(0.3 * len(columns) - 1e-9)]) == list(np.flatnonzero(chosen))
