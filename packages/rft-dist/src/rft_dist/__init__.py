"""Process groups, gathering and collectives for SPMD reinforcement fine-tuning."""

from rft_dist.agreement import raise_together, run_on_first_rank
from rft_dist.config import DistributedConfig
from rft_dist.environment import TorchrunEnvironment
from rft_dist.errors import (
    CollectiveMismatchError,
    ConfigurationError,
    DeviceError,
    DistError,
    EnvironmentVariableError,
    GatherError,
    GroupError,
    MetricError,
    RankFailedError,
    RankTimeoutError,
    RankUnresponsiveError,
    RemoteError,
    RendezvousError,
)
from rft_dist.gather import GatherPlan, all_gather_ragged, gather_inputs, slice_local
from rft_dist.groups import RolloutGroups, build_rollout_groups
from rft_dist.guard import CollectiveGuard, collective_tag
from rft_dist.layout import ParallelLayout
from rft_dist.metrics import Histogram, Max, Mean, Min, Sum, all_reduce_metrics
from rft_dist.micro_batches import balanced_micro_batches
from rft_dist.session import DistributedSession, distributed_session

__all__ = [
    "CollectiveGuard",
    "CollectiveMismatchError",
    "ConfigurationError",
    "DeviceError",
    "DistError",
    "DistributedConfig",
    "DistributedSession",
    "EnvironmentVariableError",
    "GatherError",
    "GatherPlan",
    "GroupError",
    "Histogram",
    "Max",
    "Mean",
    "MetricError",
    "Min",
    "ParallelLayout",
    "RankFailedError",
    "RankTimeoutError",
    "RankUnresponsiveError",
    "RemoteError",
    "RendezvousError",
    "RolloutGroups",
    "Sum",
    "TorchrunEnvironment",
    "all_gather_ragged",
    "all_reduce_metrics",
    "balanced_micro_batches",
    "build_rollout_groups",
    "collective_tag",
    "distributed_session",
    "gather_inputs",
    "raise_together",
    "run_on_first_rank",
    "slice_local",
]
