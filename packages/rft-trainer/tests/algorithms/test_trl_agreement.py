"""Our losses against those of TRL on the same tensors (`trl_losses.json`, written by `record_trl_losses.py`)."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rft_trainer.algorithms import (
    LossOptions,
    aggregate,
    high_entropy_mask,
    importance_weights,
    kl_loss,
    loss_denominator,
    policy_loss,
)

FOLDER = Path(__file__).parent
RECORD = json.loads((FOLDER / "trl_losses.json").read_text())


def _fixed_tensors():
    spec = importlib.util.spec_from_file_location("record_trl_losses", FOLDER / "record_trl_losses.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fixed_tensors()


# TRL's name -> (our loss, options, aggregation, fixed length, KL coefficient)
SAME = {
    "grpo": ("ppo", None, "seq-mean-token-mean", None, 0.0),
    "grpo_clip_higher": ("clip_higher", None, "seq-mean-token-mean", None, 0.0),
    "bnpo": ("ppo", None, "token-mean", None, 0.0),
    "dapo": ("clip_higher", None, "token-mean", None, 0.0),
    "dr_grpo": ("ppo", None, "seq-mean-token-sum-norm", 10, 0.0),
    "gspo": ("gspo", None, "seq-mean-token-mean", None, 0.0),
    "gspo_wide": ("gspo", LossOptions(clip_low=0.2, clip_high=0.2), "seq-mean-token-mean", None, 0.0),
    # TRL's epsilon_high is the bound itself, ours is the distance to 1
    "cispo": ("cispo", LossOptions(clip_high=4.0), "token-mean", None, 0.0),
    "sapo": ("sapo", None, "seq-mean-token-mean", None, 0.0),
    "grpo_kl": ("ppo", None, "seq-mean-token-mean", None, 0.04),
}


def _ours(kind, options, mode, fixed_length, kl_coef, weights=None):
    tensors = _fixed_tensors()
    log_probs = tensors["log_probs"].clone().requires_grad_()
    mask = tensors["mask"]
    advantages = tensors["advantages"][:, None].expand_as(mask)
    loss = policy_loss(
        log_probs, tensors["old_log_probs"], advantages, mask, kind=kind, options=options, weights=weights
    ).loss
    if kl_coef:
        loss = loss + kl_coef * kl_loss(log_probs, tensors["ref_log_probs"], mask, kind="k3")
    total = aggregate(loss, mask, mode, loss_denominator(mask, mode, fixed_length))
    total.backward()
    return total.detach(), log_probs.grad


def _assert_recorded(name, loss, gradient):
    expected = RECORD["cases"][name]
    torch.testing.assert_close(loss, torch.tensor(expected["loss"]), rtol=2e-6, atol=2e-7)
    torch.testing.assert_close(gradient, torch.tensor(expected["gradient"]), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_the_record_is_what_the_installed_trl_computes(tmp_path):
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed: uv sync")
    # A process of its own: the import takes a third of a minute and patches other libraries.
    recorder = FOLDER / "record_trl_losses.py"
    subprocess.run([sys.executable, str(recorder), str(tmp_path / "now.json")], check=True, timeout=300)
    now = json.loads((tmp_path / "now.json").read_text())
    assert now["cases"].keys() == RECORD["cases"].keys()
    for name, case in now["cases"].items():
        recorded = RECORD["cases"][name]
        assert case["loss"] == pytest.approx(recorded["loss"], rel=1e-6, abs=1e-7), name
        torch.testing.assert_close(
            torch.tensor(case["gradient"]), torch.tensor(recorded["gradient"]), rtol=1e-5, atol=1e-7, msg=name
        )


@pytest.mark.parametrize("name", SAME)
def test_equal_to_trl(name):
    _assert_recorded(name, *_ours(*SAME[name]))


def test_truncated_importance_weights_are_those_of_trl():
    tensors = _fixed_tensors()
    old, engine, mask = (tensors[name] for name in ("old_log_probs", "engine_log_probs", "mask"))
    weights = importance_weights(old, engine, mask, cap=2.0)
    assert (weights[mask.bool()] == 2.0).any()
    _assert_recorded("truncated_importance", *_ours("clip_higher", None, "token-mean", None, 0.0, weights))


def test_high_entropy_tokens_are_chosen_per_response_and_by_trl_over_the_batch():
    # Both keep every token in the divisor. TRL's threshold is a quantile over the batch of one micro-batch and all
    # ranks, which depends on the split; ours is taken in each response.
    tensors = _fixed_tensors()
    entropies, mask = tensors["entropies"], tensors["mask"].bool()
    over_the_batch = mask & (entropies >= torch.quantile(entropies[mask], 0.5))
    settings = ("clip_higher", None, "token-mean", None, 0.0)
    _assert_recorded("high_entropy", *_ours(*settings, over_the_batch.float()))
    per_response = high_entropy_mask(entropies, mask, 0.5)
    assert per_response.sum(dim=1).tolist() == [3, 2, 2, 1]
    assert over_the_batch.sum(dim=1).tolist() == [3, 2, 1, 1]
    loss, _ = _ours(*settings, per_response.float())
    assert loss.item() - RECORD["cases"]["high_entropy"]["loss"] == pytest.approx(-0.0201195, abs=1e-6)


def test_two_sided_clip_of_trl_is_our_dual_clip():
    # TRL's delta bounds r in r * A before the minimum, dual clip bounds the loss of negative advantages at -c * A:
    # the same for c >= 1 + clip_high
    _assert_recorded("two_sided", *_ours("dual_clip", None, "seq-mean-token-mean", None, 0.0))


def test_sequence_level_clip_of_all_masked_row_differs():
    # TRL's mean over rows counts a row without a token, ours does not: with one of two rows masked TRL gives half
    log_probs = torch.zeros(2, 2, requires_grad=True)
    mask = torch.tensor([[1, 1], [0, 0]])
    loss = policy_loss(log_probs, None, torch.ones(2, 2), mask, kind="ppo").loss
    mode = "seq-mean-token-mean"
    assert aggregate(loss, mask, mode, loss_denominator(mask, mode)).item() == -1.0
