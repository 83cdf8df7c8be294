"""From scores to advantages: each stage against numbers worked out by hand."""

import math

import pytest
import torch

from rft_trainer.algorithms import FixedKL
from rft_trainer.experience import Experience
from rft_trainer.experience.credit import CreditAssigner, CreditConfig


class Alone:
    """One rank."""

    def sum(self, values):
        return values


def responses(scores, lengths=None, **columns):
    """One experience per score; `columns` give one list per name."""
    lengths = lengths or [2] * len(scores)
    return [
        Experience(
            group=0,
            prompt_ids=torch.tensor([1]),
            response_ids=torch.zeros(length, dtype=torch.long),
            response_mask=torch.ones(length, dtype=torch.bool),
            engine_log_probs=torch.zeros(length),
            weights_version=1,
            truncated=False,
            score=score,
            **{name: values[number] for name, values in columns.items()},
        )
        for number, (score, length) in enumerate(zip(scores, lengths, strict=True))
    ]


def assign(experiences, *, kl=0.0, **options):
    options = {"estimator": "reinforce", "group_size": 1, **options}
    assigner = CreditAssigner(CreditConfig(**options), Alone(), FixedKL(kl))
    return assigner(experiences), assigner


def advantages(experiences):
    return [e.advantages.tolist() for e in experiences]


def test_overlong_penalty_is_in_the_reward_and_not_in_the_score():
    rows = responses([1.0] * 5, [70, 80, 90, 100, 100])
    assign(rows, max_tokens=100, overlong_buffer=20, overlong_factor=1.0)
    assert [e.reward for e in rows] == pytest.approx([1, 1, 0.5, 0, 0])
    assert [e.score for e in rows] == [1.0] * 5
    assert [e.scores["overlong"] for e in rows] == pytest.approx([0, 0, -0.5, -1, -1])


def test_overlong_filter_takes_cut_responses_out_and_keeps_them_in_the_baseline():
    rows = responses([1.0, 0.0], [4, 6])
    rows[1].truncated = True
    assign(rows, estimator="group_mean", group_size=2, overlong_filter=True)
    assert rows[0].advantages.tolist() == [0.5] * 4
    assert rows[1].response_mask.sum() == 0
    assert rows[1].advantages.tolist() == [0.0] * 6


def test_kl_in_the_reward_leaves_what_is_logged_alone():
    old = [torch.tensor([0.1, 0.2, 0.3])]
    rows = responses([1.0], [3], old_log_probs=old, ref_log_probs=[torch.zeros(3)])
    metrics, _ = assign(rows, kl=0.01, kl_estimator="k1", gamma=0.0)
    assert rows[0].advantages.tolist() == pytest.approx([-0.001, -0.002, 0.997])
    logged = metrics["rollout/kl"]
    assert logged.total / logged.count == pytest.approx(0.2)


def test_kl_of_masked_tokens_does_not_flow_back():
    rows = responses([1.0], [3], old_log_probs=[torch.tensor([0.1, 0.1, 5.0])], ref_log_probs=[torch.zeros(3)])
    rows[0].response_mask = torch.tensor([True, True, False])
    assign(rows, kl=1.0, kl_estimator="k1")
    assert rows[0].advantages.tolist() == pytest.approx([0.8, 0.9, 0.0])


def test_step_rewards_lie_on_their_tokens_and_the_rest_on_the_last_one():
    rows = responses([1.0, 0.7], [4, 4])
    rows[0].step_rewards = ((1, 0.2), (3, 0.8))
    assign(rows, gamma=0.0)
    assert advantages(rows) == [pytest.approx([0, 0.2, 0, 0.8]), pytest.approx([0, 0, 0, 0.7])]


@pytest.mark.parametrize("has_steps", [False, True])
def test_a_response_that_is_not_trained_counts_in_the_baseline_with_step_rewards_too(has_steps):
    rows = responses([1.0, 0.0, 0.5], [2, 6, 2])
    rows[1].truncated = True
    rows[1].score = 0.6
    if has_steps:
        rows[0].step_rewards = ((0, 0.4),)
    assign(rows, estimator="group_mean", group_size=3, overlong_filter=True)
    # mean 0.7; the return to go of the first response begins at its step
    assert advantages(rows) == [
        pytest.approx([0.3, -0.1 if has_steps else 0.3]),
        [0.0] * 6,
        pytest.approx([-0.2, -0.2]),
    ]


def test_a_clipped_reward_moves_the_last_token_and_keeps_the_steps():
    rows = responses([3.0], [3])
    rows[0].step_rewards = ((0, 1.0),)
    assign(rows, gamma=0.0, reward_clip=2.0)
    assert advantages(rows) == [pytest.approx([1.0, 0.0, 1.0])]


@pytest.mark.parametrize(("how", "second"), [("centre", [1.0, 3.0]), ("scale", [5.0, 7.0])])
def test_rewards_are_normalised_by_all_rewards_so_far(how, second):
    """Rewards 1, 3 then 5, 7: after the second step mean 4 and sample deviation sqrt(20 / 3)."""
    _, assigner = assign(responses([1.0, 3.0]), normalisation=how)
    rows = responses([5.0, 7.0])
    assigner(rows)
    assert [e.reward for e in rows] == pytest.approx([value / math.sqrt(20 / 3) for value in second])
    resumed = CreditAssigner(CreditConfig(estimator="reinforce", group_size=1, normalisation=how), Alone(), FixedKL(0))
    resumed.load_state_dict(assigner.state_dict())
    again, reference = responses([2.0]), responses([2.0])
    resumed(again)
    assigner(reference)
    assert again[0].reward == reference[0].reward


def test_advantages_are_clipped_after_whitening():
    rows = responses([0.0, 0.0, 0.0, 10.0], [1] * 4)
    assign(rows, whiten=True, advantage_clip=1.0)
    assert advantages(rows)[3] == [1.0]
    assert advantages(rows)[0] == pytest.approx([-0.57735], abs=1e-5)


def test_gae_fills_returns():
    values = [torch.tensor([0.5, 0.6, 0.7])]
    rows = responses([1.0], [3], values=values)
    assign(rows, estimator="gae", whiten=False, gamma=1.0, lam=0.95)
    assert rows[0].advantages.tolist() == pytest.approx([0.46575, 0.385, 0.3])
    assert rows[0].returns.tolist() == pytest.approx([0.96575, 0.985, 1.0])


def test_distillation_adds_the_teachers_lead_at_each_token():
    rows = responses(
        [0.5],
        [2],
        old_log_probs=[torch.tensor([-1.0, -2.0])],
        teacher_log_probs=[torch.tensor([-0.5, -3.0])],
    )
    assign(rows, estimator="on_policy_distillation", distillation_coef=2.0)
    assert rows[0].advantages.tolist() == pytest.approx([1.0, -2.0])


def test_a_rank_without_responses_joins():
    assert assign([], estimator="gae", whiten=True, scale="batch", normalisation="centre")[0] == {}
