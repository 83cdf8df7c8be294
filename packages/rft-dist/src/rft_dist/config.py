"""How the default process group is made."""

import math
from dataclasses import dataclass

from rft_dist.errors import ConfigurationError

_DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Choices of `distributed_session`.

    Attributes:
        device: "cuda", "cpu", or "auto" (cuda where there is one).
        backend: torch.distributed backend; None means nccl on CUDA and gloo on the CPU.
        timeout_seconds: how long one collective, or the first meeting of the ranks, may take.
        guard: check every collective over the ranks before it runs (see `CollectiveGuard`).
        guard_timeout_seconds: how long the guard waits for a rank before it names it as stuck.
    """

    device: str = "auto"
    backend: str | None = None
    timeout_seconds: float = 1800.0
    guard: bool = False
    guard_timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.device not in _DEVICES:
            raise ConfigurationError(f"device={self.device!r} is unknown: use one of {', '.join(_DEVICES)}")
        if self.backend is not None and not self.backend.strip():
            raise ConfigurationError("backend='' is no backend: leave it None for nccl on CUDA and gloo on the CPU")
        for name in ("timeout_seconds", "guard_timeout_seconds"):
            check_seconds(name, getattr(self, name))


def check_seconds(name: str, value: float) -> None:
    """Refuses a time-out that is not a positive, finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigurationError(f"{name}={value!r} is no time-out: give a positive number of seconds")
