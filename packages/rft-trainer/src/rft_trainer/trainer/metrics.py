"""What a rollout looked like, as sums with counts that any number of ranks can add up."""

from collections.abc import Sequence

import torch

from rft_dist import Max, Mean
from rft_trainer.algorithms import informative_groups
from rft_trainer.experience.experience import Experience


def rollout_metrics(experiences: Sequence[Experience], group_size: int) -> dict[str, Mean | Max]:
    """Metrics under `rollout/`; sample means unless said otherwise.

    reward, one entry per score, the reward of each label, response_length (tokens), truncated (share cut by the length
    limit), mixed_groups (share of groups with different rewards: only these teach a group estimator), all_one and
    all_zero (shares of groups without a spread whose mean reward is at least 1, or at most 0), weights_version (largest
    in the rollout).
    """
    count = len(experiences)
    if not experiences:
        # A rank whose share of a last, smaller batch is empty has nothing to add.
        return {}
    rewards = torch.tensor([e.reward for e in experiences])
    lengths = torch.tensor([float(len(e.response_ids)) for e in experiences])
    mixed = informative_groups(rewards, group_size)
    means = rewards.reshape(-1, group_size).mean(dim=1)
    metrics: dict[str, Mean | Max] = {
        "rollout/reward": Mean(float(rewards.sum()), count),
        "rollout/response_length": Mean(float(lengths.sum()), count),
        "rollout/response_length_max": Max(float(lengths.max())),
        "rollout/weights_version": Max(float(max(e.weights_version for e in experiences))),
        "rollout/truncated": Mean(sum(e.truncated for e in experiences), count),
        "rollout/mixed_groups": Mean(float(mixed.sum()), len(mixed)),
        "rollout/all_one": Mean(float((~mixed & (means >= 1)).sum()), len(mixed)),
        "rollout/all_zero": Mean(float((~mixed & (means <= 0)).sum()), len(mixed)),
    }
    for name in sorted({name for e in experiences for name in e.scores}):
        scored = [e.scores[name] for e in experiences if name in e.scores]
        metrics[f"rollout/{name}"] = Mean(sum(scored), len(scored))
    for label in sorted({e.label for e in experiences}):
        paid = [e.reward for e in experiences if e.label == label]
        metrics[f"rollout/label/{label}/reward"] = Mean(sum(paid), len(paid))
    return metrics
