"""Who this process is among its peers, as its launcher says."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rft_dist.errors import EnvironmentVariableError

_TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SINGLE_PROCESS_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class TorchrunEnvironment:
    """Rank, sizes and meeting point of this process.

    Attributes:
        rank: position in the world, 0 <= rank < world_size.
        local_rank: position on this node, 0 <= local_rank < local_world_size.
        world_size: number of processes of the job.
        local_world_size: number of processes of the job on this node.
        master_addr: host of rank 0.
        master_port: port of the meeting point on that host.
        launcher: "torchrun", "slurm" or "single" (no launcher: one process, which needs no port).
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str = "torchrun"

    def __post_init__(self) -> None:
        _check_range("WORLD_SIZE", self.world_size, 1, None)
        _check_range("RANK", self.rank, 0, self.world_size - 1)
        _check_range("LOCAL_WORLD_SIZE", self.local_world_size, 1, self.world_size)
        _check_range("LOCAL_RANK", self.local_rank, 0, self.local_world_size - 1)
        _check_range("MASTER_PORT", self.master_port, 1, 65535)
        if not self.master_addr.strip():
            raise EnvironmentVariableError("MASTER_ADDR is empty: set it to the host of rank 0, or start with torchrun")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Reads torchrun's variables, else SLURM's, else describes a single process.

        torchrun's set counts as given as soon as one of RANK, WORLD_SIZE or LOCAL_RANK is there; then all of them and
        MASTER_ADDR, MASTER_PORT must be. LOCAL_WORLD_SIZE may be left out where the world has one node
        (LOCAL_RANK equals RANK). SLURM's set counts as given with SLURM_PROCID and SLURM_NTASKS
        (or SLURM_STEP_NUM_TASKS), as `srun` sets them.

        Args:
            environ: the variables to read; None means the process's own.

        Raises:
            EnvironmentVariableError: a variable is missing, not a number or out of range.
        """
        environ = os.environ if environ is None else environ
        if any(name in environ for name in _TORCHRUN_NAMES):
            return cls._from_torchrun(environ)
        if "SLURM_PROCID" in environ and ("SLURM_NTASKS" in environ or "SLURM_STEP_NUM_TASKS" in environ):
            return cls._from_slurm(environ)
        return cls(
            rank=0,
            local_rank=0,
            world_size=1,
            local_world_size=1,
            master_addr="127.0.0.1",
            master_port=_SINGLE_PROCESS_PORT,
            launcher="single",
        )

    @classmethod
    def _from_torchrun(cls, environ: Mapping[str, str]) -> Self:
        rank = _integer(environ, "RANK")
        world_size = _integer(environ, "WORLD_SIZE")
        local_rank = _integer(environ, "LOCAL_RANK")
        if "LOCAL_WORLD_SIZE" in environ:
            local_world_size = _integer(environ, "LOCAL_WORLD_SIZE")
        elif local_rank == rank:
            local_world_size = world_size
        else:
            raise _missing(
                "LOCAL_WORLD_SIZE",
                environ,
                f"RANK {rank} and LOCAL_RANK {local_rank} differ: several nodes",
            )
        return cls(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            master_addr=_text(environ, "MASTER_ADDR"),
            master_port=_integer(environ, "MASTER_PORT"),
        )

    @classmethod
    def _from_slurm(cls, environ: Mapping[str, str]) -> Self:
        step = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        world_size = _integer(environ, step)
        rank = _integer(environ, "SLURM_PROCID")
        _check_range(step, world_size, 1, None)
        _check_range("SLURM_PROCID", rank, 0, world_size - 1)
        local_rank = _integer(environ, "SLURM_LOCALID")
        local_world_size = _slurm_local_world_size(environ, world_size)
        _check_range("SLURM_LOCALID", local_rank, 0, local_world_size - 1)
        return cls(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            master_addr=environ.get("MASTER_ADDR") or _slurm_first_host(environ),
            master_port=_integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else _slurm_port(environ),
            launcher="slurm",
        )

    def variables(self) -> dict[str, str]:
        """The torchrun variables that describe this process to code which reads them."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def _missing(name: str, environ: Mapping[str, str], because: str) -> EnvironmentVariableError:
    given = ", ".join(f"{known}={environ[known]}" for known in (*_TORCHRUN_NAMES, "SLURM_PROCID") if known in environ)
    return EnvironmentVariableError(
        f"{name} is missing ({because}; given: {given}): start with torchrun, which sets it, "
        f"or set it; for a single process unset {', '.join(_TORCHRUN_NAMES)}"
    )


def _text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise _missing(name, environ, "it is needed beside the launcher's other variables")
    return environ[name]


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not re.fullmatch(r"\s*[+-]?\d+\s*", text):
        raise EnvironmentVariableError(
            f"{name}={text!r} is not a whole number: set it to one, or start with torchrun, which sets it"
        )
    return int(text)


def _check_range(name: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"from {low} to {high}"
        raise EnvironmentVariableError(
            f"{name}={value} is out of range: it must be {wanted}; check what started this process "
            "(torchrun sets a consistent set)"
        )


def _slurm_local_world_size(environ: Mapping[str, str], world_size: int) -> int:
    """Tasks on this node, from `8`, or a list such as `8(x2),4` read at this node's position."""
    name = next((n for n in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if n in environ), None)
    if name is None:
        if "SLURM_NTASKS_PER_NODE" in environ:
            return _integer(environ, "SLURM_NTASKS_PER_NODE")
        nodes = _integer(environ, "SLURM_NNODES") if "SLURM_NNODES" in environ else 1
        return max(1, world_size // max(1, nodes))
    counts: list[int] = []
    for part in environ[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise EnvironmentVariableError(f"{name}={environ[name]!r} is not a list such as 8(x2),4: start with srun")
        counts.extend([int(match[1])] * int(match[2] or 1))
    node = _integer(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    _check_range("SLURM_NODEID", node, 0, len(counts) - 1)
    return counts[node]


def _slurm_first_host(environ: Mapping[str, str]) -> str:
    """First host of a list such as `gpu[007-010,12],login1`."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in environ:
            hosts = re.match(r"(?:[^,\[]|\[[^\]]+\])+", environ[name].strip())
            if hosts is None:
                raise EnvironmentVariableError(f"{name}={environ[name]!r} names no host: set MASTER_ADDR")
            return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", hosts[0])
    return "127.0.0.1"


def _slurm_port(environ: Mapping[str, str]) -> int:
    """A port that all tasks of one job derive alike and that two jobs on one node seldom share."""
    job = _integer(environ, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environ else 0
    return 20000 + job % 20000
