import math
import warnings

import pytest
import torch
from torch.testing import assert_close

from rft_trainer.algorithms import MismatchLimit, effective_sample_size, importance_weights, mismatch_metrics
from rft_trainer.errors import ConfigurationError, NumericalError

ENGINE = torch.tensor([[-1.0, -1.0, -1.0, -1.0]])
TRAIN = ENGINE + torch.tensor([[1.5, 0.5, 4.0, 77.0]]).log()
MASK = torch.tensor([[1, 1, 1, 0]])


@pytest.mark.parametrize(
    ("level", "mode", "cap", "expected"),
    [
        ("token", "truncate", 2.0, [1.5, 0.5, 2.0, 0.0]),
        ("token", "mask", 2.0, [1.5, 0.5, 0.0, 0.0]),
        ("token", "off", 2.0, [1.0, 1.0, 1.0, 0.0]),
        ("sequence", "truncate", 2.0, [2.0, 2.0, 2.0, 0.0]),
        ("sequence", "truncate", 5.0, [3.0, 3.0, 3.0, 0.0]),
        ("sequence", "mask", 2.0, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_weights(level, mode, cap, expected):
    weights = importance_weights(TRAIN, ENGINE, MASK, level=level, cap=cap, mode=mode)
    assert_close(weights, torch.tensor([expected]))


def test_mask_also_drops_below_the_floor():
    weights = importance_weights(TRAIN, ENGINE, MASK, mode="mask", cap=5.0, floor=0.6)
    assert_close(weights, torch.tensor([[1.5, 0.0, 4.0, 0.0]]))


def test_weights_carry_no_graph():
    assert not importance_weights(TRAIN.clone().requires_grad_(), ENGINE, MASK).requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"level": "row"}, "'row'"), ({"mode": "clip"}, "'clip'"), ({"cap": 0.5, "floor": 0.5}, "floor 0.5")],
)
def test_unknown_words_and_bad_bounds(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        importance_weights(TRAIN, ENGINE, MASK, **changes)


def test_equal_log_probs_show_no_gap():
    metrics = mismatch_metrics(ENGINE, ENGINE, MASK)
    assert metrics["gap"].mean == 0.0
    assert metrics["gap_max"].value.item() == 0.0
    assert metrics["outside"].mean == 0.0
    assert effective_sample_size(metrics["weight"].mean, metrics["weight_square"].mean) == 1.0


def test_a_fault_on_five_percent_of_the_tokens_shows():
    engine = torch.full((1, 100), -1.0)
    engine[0, :5] += 0.3
    metrics = mismatch_metrics(torch.full((1, 100), -1.0), engine, torch.ones(1, 100))
    assert metrics["outside"].mean == pytest.approx(0.05)
    assert metrics["gap"].mean == pytest.approx(0.015)
    assert metrics["gap_max"].value.item() == pytest.approx(0.3)
    assert metrics["engine_kl"].mean == pytest.approx(0.05 * (math.exp(-0.3) - 1 + 0.3), rel=1e-4)


def test_a_gap_beyond_fp32_keeps_the_metrics_finite():
    metrics = mismatch_metrics(torch.tensor([[-1.0]]), torch.tensor([[-150.0]]), torch.ones(1, 1))
    assert metrics["gap_max"].value.item() == pytest.approx(149.0)
    assert math.isfinite(effective_sample_size(metrics["weight"].mean, metrics["weight_square"].mean))


def test_effective_sample_size_counts_weights():
    metrics = mismatch_metrics(torch.tensor([[3.0, 1.0, 9.0]]).log(), torch.zeros(1, 3), torch.tensor([[1, 1, 0]]))
    share = effective_sample_size(metrics["weight"].mean, metrics["weight_square"].mean)
    assert share == pytest.approx((3 + 1) ** 2 / (9 + 1) / 2)
    assert effective_sample_size(0.0, 0.0) == 0.0


def test_limits_warn_and_stop():
    limit = MismatchLimit(warn=0.05, stop=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        limit.check(0.05)
    with pytest.warns(UserWarning, match=r"0\.1, over the warning limit 0\.05"):
        limit.check(0.1)
    with pytest.raises(NumericalError, match=r"0\.3, over the stop limit 0\.2"):
        limit.check(0.3)
    with pytest.raises(NumericalError, match="nan"):
        limit.check(math.nan)
    with pytest.raises(ConfigurationError, match=r"warn 0\.3, stop 0\.2"):
        MismatchLimit(warn=0.3, stop=0.2)
    MismatchLimit(warn=None).check(9.0)
