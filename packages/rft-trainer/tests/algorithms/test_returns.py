import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rft_trainer.algorithms import discounted_returns, gae, place_on_last_token, token_rewards


def _row(*values):
    return torch.tensor([list(values)], dtype=torch.float32)


def test_gae_worked_example():
    advantages, returns = gae(_row(0, 0, 1, 9), _row(0.5, 0.6, 0.7, 0.9), _row(1, 1, 1, 0), 1.0, 0.95)
    assert_close(advantages, _row(0.46575, 0.385, 0.3, 0.0), atol=1e-6, rtol=0)
    assert_close(returns, _row(0.96575, 0.985, 1.0, 0.0), atol=1e-6, rtol=0)
    discounted, _ = gae(_row(0, 0, 1, 9), _row(0.5, 0.6, 0.7, 0.9), _row(1, 1, 1, 0), 0.9, 0.95)
    assert_close(discounted, _row(0.2850, 0.2865, 0.3000, 0.0), atol=1e-4, rtol=0)


def test_gae_reads_no_value_behind_the_end():
    advantages, returns = gae(_row(0, 1, 0), _row(0.5, 0.2, 50), _row(1, 1, 0), 1.0, 0.95)
    assert_close(advantages, _row(0.46, 0.8, 0.0), atol=1e-6, rtol=0)
    assert_close(returns, _row(0.96, 1.0, 0.0), atol=1e-6, rtol=0)


def test_gae_steps_over_holes_as_if_they_were_not_there():
    holed = gae(_row(0, 7, 7, 0, 1), _row(0.5, 50, 60, 0.6, 0.7), _row(1, 0, 0, 1, 1), 0.9, 0.8)
    dense = gae(_row(0, 0, 1), _row(0.5, 0.6, 0.7), _row(1, 1, 1), 0.9, 0.8)
    for with_holes, without in zip(holed, dense, strict=True):
        assert_close(with_holes[:, [0, 3, 4]], without)
        assert with_holes[:, 1:3].tolist() == [[0.0, 0.0]]


def test_discounted_returns():
    assert_close(discounted_returns(_row(0, 0, 1), _row(1, 1, 1), 0.9), _row(0.81, 0.9, 1.0))
    assert discounted_returns(_row(1.0, 0.5, 3, 3), _row(1, 1, 0, 0), 1.0).tolist() == [[1.5, 0.5, 0.0, 0.0]]


def test_penalty_on_masked_tokens_does_not_flow_back():
    mask = _row(1, 1, 0)
    rewards = token_rewards(torch.tensor([1.0]), mask, kl=_row(0.1, 0.1, 5.0), kl_coef=1.0)
    assert_close(discounted_returns(rewards, mask, 1.0), _row(0.8, 0.9, 0.0))


def test_penalty_leaves_the_logged_divergence_alone():
    kl = _row(0.1, 0.2, 0.3)
    rewards = token_rewards(torch.tensor([1.0]), _row(1, 1, 1), kl=kl, kl_coef=0.01)
    assert_close(rewards, _row(-0.001, -0.002, 0.997))
    assert kl.equal(_row(0.1, 0.2, 0.3))


def test_step_rewards_and_the_row_without_steps():
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    rewards = token_rewards(torch.tensor([9.0, 0.7, 5.0]), mask, steps=[{1: 0.2, 3: 0.8}, {}, {}])
    expected = torch.tensor([[0, 0.2, 0, 0.8, 0], [0, 0, 0.7, 0, 0], [0, 0, 0, 0, 0]])
    assert_close(rewards, expected)


@pytest.mark.parametrize("column", [2, 5, -1])
def test_step_reward_on_a_masked_token_raises(column):
    with pytest.raises(ValueError, match=f"column {column}"):
        token_rewards(torch.tensor([1.0]), torch.tensor([[1, 1, 0]]), steps=[{column: 0.5}])
    with pytest.raises(ValueError, match="2 rows"):
        token_rewards(torch.tensor([1.0]), torch.tensor([[1, 1, 0]]), steps=[{}, {}])


def test_score_goes_to_the_last_token_behind_a_hole_and_nowhere_in_an_empty_row():
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    placed = place_on_last_token(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert placed.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [3, 0, 0, 0]]
    assert place_on_last_token(torch.tensor([1.0]), torch.zeros(1, 0)).shape == (1, 0)
    with pytest.raises(ValueError, match="one entry per row"):
        place_on_last_token(torch.tensor([1.0]), mask)


def test_empty_columns_and_rows_keep_their_shape():
    for shape in ((2, 0), (0, 3)):
        empty = torch.zeros(shape)
        assert discounted_returns(empty, empty, 0.9).shape == shape
        assert gae(empty, empty, empty, 0.9, 0.9)[1].shape == shape


numbers = st.lists(st.floats(-3, 3, width=32), min_size=6, max_size=6)


@settings(deadline=None, max_examples=60)
@given(numbers, numbers, st.lists(st.booleans(), min_size=6, max_size=6), st.floats(0.5, 1.0))
def test_lambda_one_is_return_minus_value(rewards, values, mask, gamma):
    rewards, values, mask = _row(*rewards), _row(*values), torch.tensor([mask])
    advantages, returns = gae(rewards, values, mask, gamma, 1.0)
    expected = discounted_returns(rewards, mask, gamma)
    assert_close(returns, expected, atol=1e-4, rtol=1e-4)
    assert_close(advantages, torch.where(mask, expected - values, 0.0), atol=1e-4, rtol=1e-4)
