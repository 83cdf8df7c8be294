import pytest

from rft_dist import EnvironmentVariableError, TorchrunEnvironment

TORCHRUN = {
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29501",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[007-010,12]",
    "SLURM_JOB_ID": "123456",
}


def test_torchrun_variables_are_read():
    environment = TorchrunEnvironment.from_environ(TORCHRUN)
    assert environment == TorchrunEnvironment(
        rank=9, local_rank=1, world_size=16, local_world_size=8, master_addr="node0", master_port=29501
    )
    assert environment.variables() == TORCHRUN


def test_local_world_size_may_be_left_out_on_one_node():
    variables = {**TORCHRUN, "RANK": "1", "WORLD_SIZE": "4"}
    del variables["LOCAL_WORLD_SIZE"]
    assert TorchrunEnvironment.from_environ(variables).local_world_size == 4


def test_no_launcher_means_one_process():
    environment = TorchrunEnvironment.from_environ({"PATH": "/bin", "MASTER_ADDR": "left over"})
    assert (environment.rank, environment.world_size, environment.local_world_size) == (0, 1, 1)
    assert environment.launcher == "single"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named_with_a_remedy(name):
    variables = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ValueError, match=rf"^{name} is missing .*: start with torchrun"):
        TorchrunEnvironment.from_environ(variables)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "one", "RANK='one' is not a whole number"),
        ("RANK", "", "RANK='' is not a whole number"),
        ("WORLD_SIZE", "2.0", r"WORLD_SIZE='2\.0' is not a whole number"),
        ("RANK", "16", "RANK=16 is out of range: it must be from 0 to 15"),
        ("RANK", "-1", "RANK=-1 is out of range"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0 is out of range: it must be at least 1"),
        ("LOCAL_RANK", "8", "LOCAL_RANK=8 is out of range: it must be from 0 to 7"),
        ("LOCAL_WORLD_SIZE", "17", "LOCAL_WORLD_SIZE=17 is out of range: it must be from 1 to 16"),
        ("MASTER_PORT", "0", "MASTER_PORT=0 is out of range: it must be from 1 to 65535"),
        ("MASTER_PORT", "http", "MASTER_PORT='http' is not a whole number"),
        ("MASTER_ADDR", " ", "MASTER_ADDR is empty"),
    ],
)
def test_a_wrong_value_is_named(name, value, message):
    with pytest.raises(EnvironmentVariableError, match=message):
        TorchrunEnvironment.from_environ({**TORCHRUN, name: value})


def test_slurm_variables_are_read():
    environment = TorchrunEnvironment.from_environ(SLURM)
    assert (environment.rank, environment.local_rank) == (5, 1)
    assert (environment.world_size, environment.local_world_size) == (8, 4)
    assert environment.master_addr == "gpu007"
    assert environment.master_port == 20000 + 123456 % 20000
    assert environment.launcher == "slurm"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"SLURM_TASKS_PER_NODE": "2,4(x2),1", "SLURM_NODEID": "2"}, 4),
        ({"SLURM_TASKS_PER_NODE": "2,4(x2),1", "SLURM_NODEID": "0"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, 8),
    ],
)
def test_slurm_tasks_of_this_node(changes, expected):
    assert TorchrunEnvironment.from_environ({**SLURM, **changes}).local_world_size == expected


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[007-010,12]", "gpu007"),
        ("login1", "login1"),
        ("a1,b2", "a1"),
        ("rack[3]-n[1-2]", "rack3-n1"),
        ("n[1-2]x", "n1x"),
    ],
)
def test_slurm_first_host(nodes, host):
    assert TorchrunEnvironment.from_environ({**SLURM, "SLURM_JOB_NODELIST": nodes}).master_addr == host


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLURM_PROCID", "8"), ("SLURM_NTASKS", "many"), ("SLURM_LOCALID", "4"), ("SLURM_TASKS_PER_NODE", "4x2")],
)
def test_a_wrong_slurm_variable_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        TorchrunEnvironment.from_environ({**SLURM, name: value})


def test_torchrun_wins_over_slurm():
    assert TorchrunEnvironment.from_environ({**SLURM, **TORCHRUN}).rank == 9
