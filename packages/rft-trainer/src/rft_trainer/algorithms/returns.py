"""Rewards laid on tokens, discounted returns and generalised advantages.

All tensors are [N, T] over response tokens. Masks may have holes (tool output, later turns): a masked token is no step
in time, carries no reward, and is skipped as if it were not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rft_trainer.algorithms.statistics import keep_masked, require_same_shape


def last_token_index(mask: Tensor) -> Tensor:
    """[N] column of the last unmasked token of each row; 0 for a row without one."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return (mask.bool() * columns).max(dim=1).values if mask.shape[1] else columns.new_zeros(mask.shape[0])


def place_on_last_token(scores: Tensor, mask: Tensor) -> Tensor:
    """[N, T] with each row's score [N] on its last unmasked token and 0 elsewhere; a row without tokens stays 0."""
    if scores.shape != mask.shape[:1]:
        raise ValueError(f"scores {tuple(scores.shape)} must have one entry per row of mask {tuple(mask.shape)}")
    placed = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    if mask.shape[1] == 0:
        return placed
    placed.scatter_(1, last_token_index(mask)[:, None], scores[:, None])
    return keep_masked(placed, mask)


def token_rewards(
    scores: Tensor,
    mask: Tensor,
    *,
    steps: Sequence[Mapping[int, float]] | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """Rewards of single tokens: the score on the last one (or step rewards), less the divergence.

    Args:
        scores: [N] one number per response.
        mask: [N, T].
        steps: per row a mapping from column to reward; an empty one falls back to the row's score on its last token.
        kl: [N, T] per-token divergence; it is read, never changed, so it can be logged afterwards.
        kl_coef: its coefficient.

    Returns:
        [N, T] fp32, 0 where masked.

    Raises:
        ValueError: shapes differ, or a step reward lies on a masked token.
    """
    rewards = place_on_last_token(scores.float(), mask)
    if steps is not None:
        _lay_steps(rewards, mask, steps)
    if kl is None:
        return rewards
    require_same_shape(kl=kl, mask=mask)
    return rewards - kl_coef * keep_masked(kl.float(), mask)


def _lay_steps(rewards: Tensor, mask: Tensor, steps: Sequence[Mapping[int, float]]) -> None:
    if len(steps) != mask.shape[0]:
        raise ValueError(
            f"steps has {len(steps)} rows, mask has {mask.shape[0]}; give an empty mapping for a plain row"
        )
    for row, step in enumerate(steps):
        if not step:
            continue
        rewards[row] = 0
        for column, reward in step.items():
            if not (0 <= column < mask.shape[1]) or not bool(mask[row, column]):
                raise ValueError(
                    f"step reward {reward} of row {row} lies on column {column}, which is masked or outside the "
                    f"{mask.shape[1]} columns; give columns of unmasked response tokens"
                )
            rewards[row, column] = reward


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return to go: G_t = r_t + gamma * G_next over unmasked tokens (Sutton and Barto, section 3.3).

    Args:
        rewards: [N, T]; masked entries are not read.
        mask: [N, T].
        gamma: discount per unmasked token.

    Returns:
        [N, T] fp32, 0 where masked.
    """
    rewards = keep_masked(rewards.float(), mask)
    present = mask.bool()
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0]) if rewards.shape[1] else rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(present[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return keep_masked(returns, mask)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438, section 3), ending at the last token.

    delta_t = r_t + gamma * V_next - V_t and A_t = delta_t + gamma * lam * A_next, where "next" is the next unmasked
    token and both are 0 behind the last one: a value at a masked slot is never read.

    Args:
        rewards: [N, T].
        values: [N, T] of the critic.
        mask: [N, T].
        gamma: discount per unmasked token.
        lam: 1 gives return minus value, 0 the one-step difference.

    Returns:
        (advantages, returns), both [N, T] fp32 and 0 where masked; returns = advantages + values, the critic's target.
    """
    require_same_shape(rewards=rewards, values=values, mask=mask)
    rewards, values = keep_masked(rewards.float(), mask), keep_masked(values.float(), mask)
    present = mask.bool()
    advantages = torch.zeros_like(rewards)
    next_value = rewards.new_zeros(rewards.shape[0])
    next_advantage = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(present[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(present[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages = keep_masked(advantages, mask)
    return advantages, keep_masked(advantages + values, mask)
