"""Baselines from the other responses to the same prompt.

Rewards are [N] with the responses of one prompt side by side: A0 A1 B0 B1 for group size 2. A group without spread gets
exactly 0 whatever its size and value, and so does a group of one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rft_trainer.algorithms.statistics import Moments
from rft_trainer.errors import ConfigurationError


class GroupBaseline(NamedTuple):
    """advantage = (reward - shift) * scale, kept apart so that step rewards can use the same baseline.

    Both are [N]; `scale` is 0 for a group without spread, which makes its advantages exactly 0.
    """

    shift: Tensor
    scale: Tensor


def split_groups(rewards: Tensor, group_size: int) -> Tensor:
    """[N] -> [N / group_size, group_size] in fp32.

    Raises:
        ValueError: rewards are not one number per response, or their number is no multiple of the group size.
    """
    if rewards.dim() != 1:
        raise ValueError(f"rewards must be [N], one number per response, got shape {tuple(rewards.shape)}")
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(f"{rewards.shape[0]} rewards do not split into groups of {group_size}; keep groups whole")
    return rewards.float().reshape(-1, group_size)


def has_spread(rewards: Tensor, group_size: int) -> Tensor:
    """[N / group_size] bool: the group holds at least two different rewards."""
    groups = split_groups(rewards, group_size)
    return groups.amax(dim=1) != groups.amin(dim=1)


def mean_baseline(rewards: Tensor, group_size: int) -> GroupBaseline:
    """The group's mean, scale 1."""
    groups = split_groups(rewards, group_size)
    return GroupBaseline(
        groups.mean(dim=1, keepdim=True).expand_as(groups).reshape(-1), _spread_scale(rewards, group_size)
    )


def leave_one_out_baseline(rewards: Tensor, group_size: int) -> GroupBaseline:
    """The mean of the others in the group, scale 1."""
    groups = split_groups(rewards, group_size)
    others = (groups.sum(dim=1, keepdim=True) - groups) / max(group_size - 1, 1)
    return GroupBaseline(others.reshape(-1), _spread_scale(rewards, group_size))


def norm_baseline(
    rewards: Tensor,
    group_size: int,
    *,
    std: str = "sample",
    eps: float = 1e-6,
    scale: str = "group",
    moments: Moments | None = None,
) -> GroupBaseline:
    """The group's mean, scale 1 / (std + eps); arguments as in `group_norm`."""
    if std not in ("sample", "population"):
        raise ConfigurationError(f"std {std!r} is not known; choose 'sample' (divides by n - 1) or 'population'")
    if scale not in ("group", "batch", "none"):
        raise ConfigurationError(f"scale {scale!r} is not known; choose 'group', 'batch' or 'none'")
    shift, spread = mean_baseline(rewards, group_size)
    if scale == "none" or group_size == 1:
        return GroupBaseline(shift, spread)
    if scale == "batch":
        moments = Moments.of(rewards) if moments is None else moments
        deviation = torch.full_like(spread, moments.variance(unbiased=std == "sample") ** 0.5)
    else:
        groups = split_groups(rewards, group_size)
        deviation = (
            groups.std(dim=1, correction=1 if std == "sample" else 0, keepdim=True).expand_as(groups).reshape(-1)
        )
    return GroupBaseline(shift, spread / (deviation + eps))


def _spread_scale(rewards: Tensor, group_size: int) -> Tensor:
    return has_spread(rewards, group_size).float().repeat_interleave(group_size)


def apply_baseline(rewards: Tensor, baseline: GroupBaseline) -> Tensor:
    """(rewards - shift) * scale, [N]; exactly 0 where the scale is 0."""
    return torch.where(
        baseline.scale == 0, torch.zeros_like(baseline.scale), (rewards - baseline.shift) * baseline.scale
    )


def group_norm(
    rewards: Tensor,
    group_size: int,
    *,
    std: str = "sample",
    eps: float = 1e-6,
    scale: str = "group",
    moments: Moments | None = None,
) -> Tensor:
    """(r - group mean) / (std + eps): GRPO (Shao et al., arXiv 2402.03300, section 4.1.2).

    Args:
        rewards: [N], groups side by side.
        group_size: responses per prompt.
        std: "sample" divides by n - 1 (our default, as torch.std), "population" by n. The paper does not say which.
        eps: added to the deviation.
        scale: whose deviation: "group", "batch" (of all rewards; Hu et al., arXiv 2501.03262) or "none" (Dr.GRPO,
            Liu et al., arXiv 2503.20783).
        moments: of all rewards over all ranks, for scale "batch"; None takes `rewards` alone.

    Returns:
        [N] fp32. [1, 0, 0, 1] gives +-0.866025 (sample) or +-1 (population).

    Raises:
        ConfigurationError: unknown word for `std` or `scale`.
        ValueError: N is no multiple of the group size.
    """
    return apply_baseline(rewards, norm_baseline(rewards, group_size, std=std, eps=eps, scale=scale, moments=moments))


def group_mean(rewards: Tensor, group_size: int) -> Tensor:
    """r - group mean, [N] fp32: Dr.GRPO without the deviation (Liu et al., arXiv 2503.20783)."""
    return apply_baseline(rewards, mean_baseline(rewards, group_size))


def rloo(rewards: Tensor, group_size: int) -> Tensor:
    """r - mean of the others in the group, [N] fp32 (RLOO, Ahmadian et al., arXiv 2402.14740)."""
    return apply_baseline(rewards, leave_one_out_baseline(rewards, group_size))


def reinforce_baseline(rewards: Tensor, group_size: int) -> Tensor:
    """r - group mean, [N] fp32: REINFORCE++ with baseline before its whitening (Hu et al., arXiv 2501.03262).

    The paper then whitens over the whole batch; that is a step of its own here (`whiten`, once, over all ranks), so the
    numbers of this function equal those of `group_mean`.
    """
    return group_mean(rewards, group_size)


def informative_groups(
    scores: Tensor, group_size: int, *, lowest_mean: float | None = None, highest_mean: float | None = None
) -> Tensor:
    """Which groups teach something: the filter of dynamic sampling (DAPO, Yu et al., arXiv 2503.14476, section 3.2).

    Args:
        scores: [N] raw scores, before penalties and shaping.
        group_size: responses per prompt.
        lowest_mean, highest_mean: further bounds (inclusive) on the group's mean score, for filtering by difficulty.

    Returns:
        [N / group_size] bool. Without bounds: the group has a spread. The paper asks for 0 < correct < group size,
        which is the same for scores of 0 and 1.
    """
    mean = split_groups(scores, group_size).mean(dim=1)
    keep = has_spread(scores, group_size)
    if lowest_mean is not None:
        keep = keep & (mean >= lowest_mean)
    if highest_mean is not None:
        keep = keep & (mean <= highest_mean)
    return keep
