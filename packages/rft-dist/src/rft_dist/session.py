"""The default process group, from before the first allocation to after the last collective."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rft_dist.config import DistributedConfig
from rft_dist.environment import TorchrunEnvironment
from rft_dist.errors import DeviceError, EnvironmentVariableError, RendezvousError
from rft_dist.guard import CollectiveGuard

Initializer = Callable[[str, timedelta], object]


@dataclass(frozen=True, kw_only=True)
class DistributedSession:
    """This process among its peers, while the default group lives.

    Attributes:
        rank: position in the world.
        local_rank: position on this node.
        world_size: number of processes.
        local_world_size: number of processes on this node.
        device: the device bound to this process.
        environment: what the launcher said.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    environment: TorchrunEnvironment


@contextmanager
def distributed_session(
    config: DistributedConfig | None = None, *, initializer: Initializer | None = None
) -> Iterator[DistributedSession]:
    """Binds the device, makes the default process group and takes it down at the end. Collective over the world.

    Works under torchrun, under srun, and in a single process without a launcher (world 1, no port taken). Where a
    default group exists already it is joined, and left standing at the end.
    Within the session torchrun's variables describe this process, whatever started it, for libraries which read them.

    Args:
        config: None means `DistributedConfig()`.
        initializer: called as initializer(backend, timeout) in place of `torch.distributed.init_process_group`.

    Raises:
        EnvironmentVariableError: (a ValueError) a launcher's variable is missing or wrong.
        DeviceError: no such device, or more ranks on this node than devices.
        RendezvousError: the ranks could not meet.
    """
    config = config or DistributedConfig()
    joined = dist.is_initialized()
    environment = _environment(joined)
    device = choose_device(config.device, environment, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if device.type == "cuda":
        # Before anything allocates: the first allocation would otherwise open a context on device 0 in every process.
        torch.cuda.set_device(device)
    with ExitStack() as stack:
        stack.enter_context(_exported(environment))
        if not joined:
            _initialize(config, environment, device, initializer)
            stack.callback(_destroy_default)
        if config.guard:
            stack.enter_context(CollectiveGuard(timeout_seconds=config.guard_timeout_seconds))
        yield DistributedSession(
            rank=environment.rank,
            local_rank=environment.local_rank,
            world_size=environment.world_size,
            local_world_size=environment.local_world_size,
            device=device,
            environment=environment,
        )


def choose_device(wanted: str, environment: TorchrunEnvironment, cuda_devices: int) -> torch.device:
    """The device of this process: the CUDA device at its local rank, or the CPU.

    Args:
        wanted: "auto", "cpu" or "cuda".
        environment: this process.
        cuda_devices: devices that this process sees.

    Raises:
        DeviceError: cuda is wanted and there is none, or this node has more ranks than devices.
    """
    if wanted == "cpu" or (wanted == "auto" and cuda_devices == 0):
        return torch.device("cpu")
    if cuda_devices == 0:
        raise DeviceError("device='cuda', but this process sees no CUDA device: set device='cpu' or 'auto'")
    if environment.local_world_size > cuda_devices:
        raise DeviceError(
            f"LOCAL_WORLD_SIZE={environment.local_world_size} ranks on this node, but only {cuda_devices} CUDA devices "
            f"are visible to LOCAL_RANK={environment.local_rank}: start at most {cuda_devices} ranks on a node "
            "(--nproc_per_node), let every rank see all devices, or set device='cpu'"
        )
    return torch.device("cuda", environment.local_rank)


def _environment(joined: bool) -> TorchrunEnvironment:
    environment = TorchrunEnvironment.from_environ()
    if not joined:
        return environment
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if environment.launcher == "single":
        return TorchrunEnvironment(
            rank=rank,
            local_rank=rank,
            world_size=world_size,
            local_world_size=world_size,
            master_addr=environment.master_addr,
            master_port=environment.master_port,
            launcher="single",
        )
    if (environment.rank, environment.world_size) != (rank, world_size):
        raise EnvironmentVariableError(
            f"RANK={environment.rank} and WORLD_SIZE={environment.world_size}, but the existing default group has this "
            f"process as rank {rank} of {world_size}: destroy that group first, or start it with the launcher's numbers"
        )
    return environment


@contextmanager
def _exported(environment: TorchrunEnvironment) -> Iterator[None]:
    """Shows torchrun's variables to libraries that read them, and puts back what was there."""
    before = {name: os.environ.get(name) for name in environment.variables()}
    os.environ.update(environment.variables())
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _initialize(
    config: DistributedConfig, environment: TorchrunEnvironment, device: torch.device, initializer: Initializer | None
) -> None:
    """Makes the default group. Collective over the world."""
    backend = config.backend or ("nccl" if device.type == "cuda" else "gloo")
    timeout = timedelta(seconds=config.timeout_seconds)
    if environment.launcher == "single":
        # No launcher, no peers: a store inside this process, so that no port is taken. An initializer joins this group.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    try:
        if initializer is not None:
            initializer(backend, timeout)
        elif not dist.is_initialized():
            bound = device if device.type == "cuda" and backend == "nccl" else None
            dist.init_process_group(backend, init_method="env://", timeout=timeout, device_id=bound)
    except (dist.DistNetworkError, dist.DistStoreError) as failure:
        raise _rendezvous_error(environment, config, failure) from failure


def _rendezvous_error(
    environment: TorchrunEnvironment, config: DistributedConfig, failure: Exception
) -> RendezvousError:
    meeting = f"MASTER_ADDR={environment.master_addr} MASTER_PORT={environment.master_port}"
    if "EADDRINUSE" in str(failure) or "address already in use" in str(failure).lower():
        return RendezvousError(
            f"MASTER_PORT={environment.master_port} is taken on this host by another process: choose another port "
            "(torchrun --master_port, or --rdzv-endpoint=localhost:0 for a free one), or end the process that holds it"
        )
    return RendezvousError(
        f"rank {environment.rank} of {environment.world_size} did not meet the others at {meeting} within "
        f"{config.timeout_seconds:g} s: check that all ranks were started and can reach rank 0's host and port"
    )


def _destroy_default() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
