"""Who is where in which phase, and the order in which a border between phases moves them."""

import pytest

from rft_trainer.config import RFTConfig
from rft_trainer.memory import ENGINE, Placement, Stage, plan_placement
from rft_trainer.memory.build import placement_plan

DEVICE, HOST, ANY = Placement.DEVICE, Placement.HOST, Placement.ANY


def plan(**changes):
    defaults = {"offload_trained": True, "offload_frozen": True, "optimizer_on_host": True, "engine_sleeps": True}
    return plan_placement(trained=("actor", "critic"), frozen=("reference",), **{**defaults, **changes})


def column(made, owner):
    phases = ("generate", "actor_log_probs", "reference", "rewards", "update", "sync", "evaluate", "checkpoint")
    return [made.placement(owner, phase) for phase in phases]


def test_with_everything_switched_on_only_what_a_phase_needs_is_there():
    made = plan()
    assert column(made, "actor") == [HOST, DEVICE, DEVICE, ANY, DEVICE, DEVICE, HOST, DEVICE]
    assert column(made, "critic") == column(made, "actor")
    assert column(made, "actor optimiser") == [HOST, HOST, HOST, HOST, ANY, HOST, HOST, ANY]
    assert column(made, "reference") == [HOST, HOST, DEVICE, HOST, HOST, HOST, HOST, HOST]
    assert column(made, ENGINE) == [DEVICE, HOST, HOST, HOST, HOST, ANY, DEVICE, ANY]


def test_with_everything_switched_off_nothing_ever_leaves():
    made = plan(offload_trained=False, offload_frozen=False, optimizer_on_host=False, engine_sleeps=False)
    for owner in made.owners:
        assert HOST not in column(made, owner)
        assert made.placement(owner, "a phase of tomorrow") is not HOST
    assert "reference" in made.table()


def test_a_phase_that_the_plan_does_not_know_finds_every_model_there():
    made = plan()
    assert [made.placement(owner, "new") for owner in ("actor", "critic", "reference")] == [DEVICE] * 3


@pytest.mark.parametrize(
    ("changes", "owner", "phase", "expected"),
    [
        ({"offload_trained": True}, "actor", "generate", HOST),
        # What CPUOffloadPolicy places is never moved by hand, and not missed where it lies.
        ({"offload_trained": True, "fsdp": True, "fsdp_cpu_offload": True}, "actor", "generate", ANY),
        ({"offload_trained": True, "fsdp": True, "fsdp_cpu_offload": True}, "actor optimiser", "generate", ANY),
        ({"offload_frozen": True}, "reference", "update", HOST),
        ({"adam_offload": True, "fsdp": True}, "actor optimiser", "rewards", HOST),
        ({"adam_offload": True, "fsdp": False}, "actor optimiser", "rewards", ANY),
        ({"enable_engine_sleep": True}, ENGINE, "update", HOST),
        ({"enable_engine_sleep": True}, ENGINE, "rewards", HOST),
        ({"enable_engine_sleep": True, "dynamic_sampling": True}, ENGINE, "rewards", DEVICE),
        (
            {"enable_engine_sleep": True, "dynamic_sampling": True, "dynamic_sampling_rounds": 1},
            ENGINE,
            "rewards",
            HOST,
        ),
        ({}, ENGINE, "update", ANY),
    ],
)
def test_the_flags_reach_the_plan(changes, owner, phase, expected):
    made = placement_plan(RFTConfig(**changes), ("actor",), ("reference",))
    assert made.placement(owner, phase) is expected


class Recorder:
    """Memory, runtime and actor in one, which write down what is done to them."""

    def __init__(self, events, owner=""):
        self.events, self.owner, self.on_host = events, owner, False

    def offload(self):
        self.events.append(f"{self.owner} out")
        self.on_host = True

    def reload(self):
        if self.on_host:
            self.events.append(f"{self.owner} in")
        self.on_host = False

    def take_moves(self):
        return []

    def sleep(self, *, update_follows):
        self.events.append(f"sleep, drop {update_follows}")
        return True

    def restore_weights(self, state):
        self.events.append("weights")

    def wake(self):
        self.events.append("kv")


def test_what_leaves_goes_before_what_comes_and_kv_is_last():
    import torch

    events = []
    owners = {name: Recorder(events, name) for name in ("actor", "actor optimiser", "reference")}
    made = plan_placement(
        trained=("actor",),
        frozen=("reference",),
        offload_trained=True,
        offload_frozen=True,
        optimizer_on_host=True,
        engine_sleeps=True,
    )
    stage = Stage(made, owners, Recorder(events), None, torch.device("cpu"), full_updates=True)

    def enter(phase):
        events.clear()
        stage.enter(phase)
        return list(events)

    assert enter("sync") == ["actor optimiser out", "reference out"]
    assert enter("generate") == ["weights", "actor out", "kv"]
    assert enter("actor_log_probs") == ["sleep, drop True", "actor in"]
    assert enter("reference") == ["sleep, drop False", "reference in"]
    assert enter("rewards") == ["reference out", "sleep, drop False"]
    assert enter("update") == ["sleep, drop True"]
    assert enter("sync") == []
    assert enter("evaluate") == ["weights", "actor out", "kv"]
    # The KV cache of an evaluation would stand beside all that a checkpoint needs.
    assert enter("checkpoint") == ["sleep, drop False", "actor in"]
    assert enter("generate") == ["weights", "actor out", "kv"]


def test_between_two_rounds_of_sampling_the_engine_stays_awake_and_sleeps_once_behind_them():
    import torch

    events = []
    made = plan_placement(
        trained=("actor",),
        frozen=(),
        offload_trained=True,
        offload_frozen=True,
        optimizer_on_host=True,
        engine_sleeps=True,
        more_rounds=True,
    )
    stage = Stage(
        made, {"actor": Recorder(events, "actor")}, Recorder(events), None, torch.device("cpu"), full_updates=True
    )

    def enter(phase):
        events.clear()
        stage.enter(phase)
        return list(events)

    assert enter("sync") == []
    assert enter("generate") == ["weights", "actor out", "kv"]
    for _ in range(2):
        assert enter("rewards") == ["weights", "kv"]
        assert enter("generate") == ["weights", "kv"]
    assert enter("rewards") == ["weights", "kv"]
    assert enter("actor_log_probs") == ["sleep, drop True", "actor in"]
