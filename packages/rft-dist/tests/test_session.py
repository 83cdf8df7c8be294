import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rft_dist import (
    CollectiveMismatchError,
    DeviceError,
    DistributedConfig,
    EnvironmentVariableError,
    RankUnresponsiveError,
    RendezvousError,
    TorchrunEnvironment,
    all_reduce_metrics,
    distributed_session,
)
from rft_dist.session import choose_device
from rft_dist.testing import run_ranks

CPU = DistributedConfig(device="cpu")
TORCHRUN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_launcher(monkeypatch):
    for name in TORCHRUN_NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "gpu"),
        ("backend", " "),
        ("timeout_seconds", 0),
        ("timeout_seconds", float("inf")),
        ("timeout_seconds", "60"),
        ("guard_timeout_seconds", -1.0),
        ("guard_timeout_seconds", float("nan")),
    ],
)
def test_a_config_is_checked_when_it_is_made(field, value):
    with pytest.raises(ValueError, match=f"^{field}="):
        DistributedConfig(**{field: value})


def test_a_single_process_needs_no_launcher_and_no_port(no_launcher):
    with distributed_session(CPU) as session:
        assert (session.rank, session.world_size, session.local_rank, session.local_world_size) == (0, 1, 0, 1)
        assert session.device == torch.device("cpu")
        assert session.environment.launcher == "single"
        assert dist.get_backend() == "gloo"
        assert all_reduce_metrics({"a": 2.0}) == {"a": 2.0}
        assert os.environ["RANK"] == "0"
        value = torch.ones(2)
        dist.all_reduce(value)
        assert value.tolist() == [1.0, 1.0]
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


def test_a_session_is_taken_down_after_an_error_and_can_be_made_again(no_launcher):
    with pytest.raises(KeyError, match="boom"), distributed_session(CPU):
        raise KeyError("boom")
    assert not dist.is_initialized()
    with distributed_session(CPU) as session:
        assert session.world_size == 1


def test_a_nested_session_joins_and_leaves_the_group_standing(no_launcher):
    with distributed_session(CPU) as outer:
        with distributed_session(CPU) as inner:
            assert (inner.rank, inner.world_size) == (outer.rank, outer.world_size)
        assert dist.is_initialized()


def test_a_group_that_others_made_is_joined_without_a_launcher(no_launcher):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with distributed_session(CPU) as session:
        assert (session.rank, session.world_size) == (0, 1)
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_a_group_that_contradicts_the_launcher_is_refused(no_launcher):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, value in zip(TORCHRUN_NAMES, ("1", "1", "2", "2", "127.0.0.1", "29500"), strict=True):
        no_launcher.setenv(name, value)
    with pytest.raises(EnvironmentVariableError, match=r"RANK=1 and WORLD_SIZE=2, but .* rank 0 of 1"):
        distributed_session(CPU).__enter__()
    dist.destroy_process_group()


def test_an_initializer_takes_the_place_of_torchs(no_launcher):
    calls = []

    def initializer(backend, timeout):
        calls.append((backend, timeout, dist.is_initialized(), os.environ["WORLD_SIZE"]))

    with distributed_session(DistributedConfig(device="cpu", timeout_seconds=90), initializer=initializer):
        assert calls == [("gloo", timedelta(seconds=90), True, "1")]
    assert not dist.is_initialized()


def test_a_taken_port_is_named(no_launcher):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        for name, value in zip(TORCHRUN_NAMES, ("0", "0", "1", "1", "127.0.0.1", str(port)), strict=True):
            no_launcher.setenv(name, value)
        with (
            pytest.raises(RendezvousError, match=f"MASTER_PORT={port} is taken .*: choose another port"),
            distributed_session(CPU),
        ):
            pass
    assert not dist.is_initialized()


def environment_of(local_rank, local_world_size):
    return TorchrunEnvironment(
        rank=local_rank,
        local_rank=local_rank,
        world_size=local_world_size,
        local_world_size=local_world_size,
        master_addr="localhost",
        master_port=29500,
    )


@pytest.mark.parametrize(
    ("wanted", "devices", "chosen"),
    [("auto", 0, "cpu"), ("cpu", 8, "cpu"), ("auto", 8, "cuda:3"), ("cuda", 4, "cuda:3")],
)
def test_each_local_rank_has_its_own_device(wanted, devices, chosen):
    assert choose_device(wanted, environment_of(3, 4), devices) == torch.device(chosen)


def test_more_ranks_on_a_node_than_devices_are_refused_on_each_of_them():
    for local_rank in range(8):
        with pytest.raises(DeviceError, match=r"LOCAL_WORLD_SIZE=8 ranks on this node, but only 4 CUDA devices"):
            choose_device("cuda", environment_of(local_rank, 8), 4)


def test_a_wish_for_cuda_without_a_device_is_refused():
    with pytest.raises(DeviceError, match="set device='cpu' or 'auto'"):
        choose_device("cuda", environment_of(0, 1), 0)


def own_session(rank, world_size, variables, body, guard):
    """Leaves the group that run_ranks made and meets anew as a launcher's variables say."""
    port = os.environ["MASTER_PORT"]
    dist.destroy_process_group()
    for name in TORCHRUN_NAMES:
        del os.environ[name]
    os.environ.update({name: value.format(rank=rank, world=world_size, port=port) for name, value in variables.items()})
    config = DistributedConfig(device="cpu", timeout_seconds=600, guard=guard, guard_timeout_seconds=600)
    try:
        with distributed_session(config) as session:
            return body(session), session.environment.launcher
    except (CollectiveMismatchError, RankUnresponsiveError) as error:
        return type(error).__name__, str(error)


TORCHRUN = {
    "RANK": "{rank}",
    "LOCAL_RANK": "{rank}",
    "WORLD_SIZE": "{world}",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "{port}",
}
SLURM = {
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_NTASKS": "{world}",
    "SLURM_NTASKS_PER_NODE": "{world}",
    "MASTER_PORT": "{port}",
}


def world_sum(session):
    total = torch.tensor([session.rank + 1])
    dist.all_reduce(total)
    return int(total), os.environ["LOCAL_WORLD_SIZE"]


@pytest.mark.parametrize(("variables", "launcher"), [(TORCHRUN, "torchrun"), (SLURM, "slurm")])
def test_ranks_meet_as_their_launcher_says(variables, launcher):
    results = run_ranks(own_session, 2, variables, world_sum, True, guard=False)
    assert results == [((3, "2"), launcher)] * 2


def mispair(session):
    dist.all_reduce(torch.ones(2 + session.rank))


def test_the_guard_of_a_session_works_over_its_store():
    results = run_ranks(own_session, 2, TORCHRUN, mispair, True, guard=False)
    assert results[0] == results[1]
    assert results[0][0] == "CollectiveMismatchError"
    assert "rank 1 differs: it called all_reduce(float32[3], op=sum)" in results[0][1]


def first_dies(session):
    dist.all_reduce(torch.ones(1))
    if session.rank == 0:
        os._exit(9)
    dist.barrier()


def test_the_death_of_the_rank_that_holds_the_store_is_told_before_any_time_out():
    with pytest.raises(RuntimeError, match="rank 0 of 2 died") as caught:
        run_ranks(own_session, 2, TORCHRUN, first_dies, True, guard=False)
    kind, text = caught.value.results[1]
    assert kind == "RankUnresponsiveError"
    assert "lost the store that the ranks share while it waited in barrier()" in text


SCRIPT = """
from rft_dist import DistributedConfig, ParallelLayout, Sum, all_reduce_metrics
from rft_dist import build_rollout_groups, distributed_session

with distributed_session(DistributedConfig(device="cpu", guard=True)) as session:
    with build_rollout_groups(ParallelLayout(session.world_size, 2)) as groups:
        total = all_reduce_metrics({"ranks": Sum(session.rank)}, groups.tp_cpu)["ranks"]
    print(f"rank {session.rank} of {session.world_size} total {total}", flush=True)
"""


@pytest.mark.slow
def test_a_script_under_torchrun_ends_without_a_word_on_stderr(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning:torch.distributed"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == ["rank 0 of 2 total 1.0", "rank 1 of 2 total 1.0"]
    assert done.stderr == ""
