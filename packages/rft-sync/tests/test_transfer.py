"""Weights for engines in other processes: order, failures on either side, changed bytes."""

import copy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from rft_sync import (
    EngineRefused,
    ManifestMismatch,
    ModuleReceiver,
    ModuleSource,
    RecordingReceiver,
    UnknownTensor,
    WeightSyncError,
    receive_weights,
    send_weights,
    source_for,
    transfer,
)
from rft_sync.testing import spawn_ranks

sys.path.insert(0, str(Path(__file__).parent))
from small_net import Net


class Refuses(RecordingReceiver):
    """Takes the plan and no bucket."""

    def load(self, bucket):
        raise EngineRefused("planned in load")


class Slow(RecordingReceiver):
    """Copies after a delay, on another thread, and says when it is done."""

    def __init__(self, delay):
        super().__init__()
        self.delay = delay
        self.order = []

    def load(self, bucket):
        self.order.extend(bucket.names)
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor(1)

        def work():
            time.sleep(self.delay)
            super(Slow, self).load(bucket)

        future = pool.submit(work)
        pool.shutdown(wait=False)

        class Handle:
            def wait(self):
                future.result()

        return Handle()


def _separate(rank, trainers, delay, repeats):
    receivers = dist.new_group([0, trainers])
    trainer_group = dist.new_group(list(range(trainers)))
    tensors = {f"t{i}": torch.full((64,), float(i)) for i in range(8)}
    if rank < trainers:
        model = nn.ParameterDict({name: nn.Parameter(tensor.clone()) for name, tensor in tensors.items()})
        if trainers > 1:
            fully_shard(model, mesh=DeviceMesh("cpu", list(range(trainers))))
        source = source_for(model)
        for repeat in range(repeats):
            send_weights(source, version=repeat + 1, group=receivers, trainer_group=trainer_group, bucket_bytes=256)
        return None
    receiver = Slow(delay)
    for repeat in range(repeats):
        assert receive_weights(receiver, group=receivers) == repeat + 1
        for name, value in tensors.items():
            assert torch.equal(receiver.tensors[name], value), name
    return receiver.order


def test_eight_slow_buckets_over_four_trainers_arrive_in_order_and_no_rank_waits_for_ever():
    results = spawn_ranks(_separate, 5, 4, 0.25, 1)
    assert results[4] == [f"t{i}" for i in range(8)]


def test_double_buffered_transfer_is_bit_equal_over_many_repeats():
    results = spawn_ranks(_separate, 2, 1, 0.001, 100, timeout_seconds=300)
    assert results[1] == [f"t{i}" for i in range(8)] * 100


def _separate_failures(rank):
    group = dist.new_group([0, 2])
    trainers = dist.new_group([0, 1])
    results = []
    model, nan = Net(1), Net(1)
    with torch.no_grad():
        nan.k_proj.bias[0] = float("nan")
    receiver = Refuses()
    engine = ModuleReceiver(Net(2))
    for case in ("receiver", "sender", "plan", "good"):
        try:
            if rank < 2:
                source = ModuleSource(nan if case == "sender" else copy.deepcopy(model))
                if case == "plan" and rank == 1:
                    source = ModuleSource(nn.Linear(2, 2))
                send_weights(source, version=3, group=group, trainer_group=trainers, bucket_bytes=64)
            else:
                receive_weights(receiver if case == "receiver" else engine, group=group)
            results.append("ok")
        except WeightSyncError as error:
            results.append(type(error).__name__)
    if rank == 2:
        assert engine.session.usable
        assert not receiver.session.usable
        assert all(torch.equal(a, b) for a, b in zip(engine._module.parameters(), model.parameters(), strict=True))
    return results


class Flips(ModuleReceiver):
    """An engine whose loader changes one bit."""

    def load(self, bucket):
        super().load(bucket)
        if "k_proj.weight" in bucket.names:
            self._places["k_proj.weight"].view().view(-1)[:1].view(torch.int32)[0] ^= 1


def _changed_on_the_way(rank):
    model, results = Net(1), []
    engine = ModuleReceiver(Net(2))
    ring = transfer._Ring
    arrived = ring.buffer
    for case in ("loader", "wire", "good"):
        if rank == 1 and case == "wire":

            def flipped(self, index):
                buffer = arrived(self, index)
                if index == 1:
                    buffer[40] ^= 1
                return buffer

            ring.buffer = flipped
        try:
            if rank == 0:
                send_weights(ModuleSource(model), version=1, bucket_bytes=150)
            else:
                receive_weights(Flips(Net(2)) if case == "loader" else engine)
            results.append("ok")
        except WeightSyncError as error:
            results.append((type(error).__name__, str(error).partition(";")[0]))
            assert case == "loader" or rank == 0 or not engine.session.usable
        ring.buffer = arrived
    if rank == 1:
        assert engine.session.usable
        assert all(torch.equal(a, b) for a, b in zip(engine._module.parameters(), model.parameters(), strict=True))
    return results


def test_a_bit_flipped_on_the_way_or_by_the_loader_is_found_on_both_sides():
    sender, engine = spawn_ranks(_changed_on_the_way, 2)
    assert sender == engine
    assert sender[0] == (
        "VerificationFailed",
        "1 of 6 tensors in the engine differ from what was sent: ['k_proj.weight']",
    )
    assert sender[1] == ("VerificationFailed", "bucket 1 was changed on its way")
    assert sender[2] == "ok"


class OtherRelease(ModuleReceiver):
    """On a side that reads the announcement differently."""

    def start(self, manifest):
        raise ManifestMismatch("the received manifest has another digest")


def _refused_plans(rank):
    """Two trainers, two engines, of which the second refuses."""
    group, trainers = dist.new_group([0, 2, 3]), dist.new_group([0, 1])
    engine = ModuleReceiver(Net(2))
    before = copy.deepcopy(engine._module.state_dict())
    results = []
    for case in ("refused", "good"):
        receiver = OtherRelease(Net(2)) if rank == 3 and case == "refused" else engine
        try:
            if rank < 2:
                source = source_for(Net(1))
                send_weights(source, version=1, group=group, trainer_group=trainers, bucket_bytes=64)
            else:
                receive_weights(receiver, group=group)
            results.append("ok")
        except WeightSyncError as error:
            results.append(type(error).__name__)
            if rank == 2:
                assert engine.session.usable
                assert all(torch.equal(before[name], value) for name, value in engine._module.state_dict().items())
    return results


def test_a_receiver_that_refuses_the_plan_is_heard_before_the_first_byte():
    assert spawn_ranks(_refused_plans, 4) == [["ManifestMismatch", "ok"]] * 4


def test_failures_on_either_side_reach_both_and_the_next_update_works():
    first, second, engine = spawn_ranks(_separate_failures, 3)
    assert first == second == engine == ["EngineRefused", "NonFiniteWeight", "ManifestMismatch", "ok"]


def _one_trainer_stays_away(rank):
    """Two trainers, one engine; the second trainer comes to the second call only."""
    group, trainers = dist.new_group([0, 2]), dist.new_group([0, 1])
    receiver, results = RecordingReceiver(), []
    for attempt in (1, 2):
        if rank == 1 and attempt == 2:
            time.sleep(4)  # else its second call would be the first that it is waited for
        try:
            if rank == 2:
                receive_weights(receiver, group=group)
            elif rank == 0 or attempt == 2:
                send_weights(
                    source_for(Net(1)),
                    version=1,
                    group=group,
                    trainer_group=trainers,
                    attendance_seconds=2.0 if attempt == 1 else 60.0,
                )
            results.append("ok")
        except ManifestMismatch as error:
            results.append(str(error).partition(" within")[0])
    return results


def test_a_trainer_that_stays_away_is_named_on_both_sides_and_the_next_update_works():
    missing = "ranks [1] of 2 did not call send_weights"
    assert spawn_ranks(_one_trainer_stays_away, 3) == [
        [missing, "ok"],
        ["ok", "ok"],
        [f"the sender could not plan the update: {missing}", "ok"],
    ]


def test_why_there_is_no_plan_keeps_its_class_and_names_where_both_sides_know_them():
    told = transfer._refusal_from_json(transfer._refusal_to_json(UnknownTensor("no such", ["a.b"])))
    assert (type(told), told.names) == (UnknownTensor, ("a.b",))
    assert str(told) == "the sender could not plan the update: no such"
    told = transfer._refusal_from_json(transfer._refusal_to_json(ZeroDivisionError("by 0")))
    assert (type(told), str(told)) == (
        WeightSyncError,
        "the sender could not plan the update: ZeroDivisionError: by 0",
    )
    for text in (
        '{"error": "old"}',
        '{"error": "old", "kind": "Iterable"}',
        '{"error": "old", "kind": "NewKind", "names": []}',
    ):
        assert type(transfer._refusal_from_json(text)) is WeightSyncError
