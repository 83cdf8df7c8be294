import os
import signal
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from rft_dist import CollectiveGuard, CollectiveMismatchError, RankUnresponsiveError, collective_tag
from rft_dist.testing import run_ranks

HERE = __file__


def outcome(body, rank, world_size, timeout_seconds):
    """Runs the body under a guard; returns (type, text) of what it raised."""
    try:
        with CollectiveGuard(timeout_seconds=timeout_seconds):
            body(rank, world_size)
    except (CollectiveMismatchError, RankUnresponsiveError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def different_shapes(rank, world_size):
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(3 if rank == 2 else 2))


def different_dtypes(rank, world_size):
    dist.broadcast(torch.ones(2, dtype=torch.float64 if rank == 1 else torch.float32), src=0)


def different_functions(rank, world_size):
    dist.all_reduce(torch.ones(2))
    if rank == 0:
        dist.broadcast(torch.ones(2), src=0)
    else:
        dist.all_reduce(torch.ones(2))


def different_roots(rank, world_size):
    dist.broadcast(torch.ones(2), src=rank % 2)


def different_reductions(rank, world_size):
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)


def different_tags(rank, world_size):
    with collective_tag("update actor" if rank == 0 else "update critic"):
        dist.all_reduce(torch.ones(2))


def different_groups_of_the_same_ranks(rank, world_size):
    first, second = dist.new_group(list(range(world_size))), dist.new_group(list(range(world_size)))
    dist.all_reduce(torch.ones(2), group=first if rank == 0 else second)


def groups_in_different_order(rank, world_size):
    for ranks in [[0, 1], [2, 3]] if rank % 2 else [[2, 3], [0, 1]]:
        dist.new_group(ranks)


def waiting_in_a_circle(rank, world_size):
    left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=left)
    elif rank == 1:
        dist.all_reduce(torch.ones(1), group=right)
        dist.all_reduce(torch.ones(1), group=left)
    else:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), group=right)


MISMATCHES = {
    different_shapes: (4, 2, ["all_reduce(float32[3], op=sum)", "rank 0, 1, 3 called all_reduce(float32[2], op=sum)"]),
    different_dtypes: (2, 1, ["broadcast(float64[2], src=0)", "rank 0 called broadcast(float32[2], src=0)"]),
    different_functions: (4, 0, ["broadcast(float32[2], src=0)", "rank 1, 2, 3 called all_reduce("]),
    different_roots: (2, 1, ["src=1", "src=0"]),
    different_reductions: (2, 1, ["op=max", "op=sum"]),
    different_tags: (2, 1, ["tagged 'update critic'", "tagged 'update actor'"]),
    different_groups_of_the_same_ranks: (2, 1, ["on group '2'", "on group '1'"]),
    groups_in_different_order: (4, 1, ["new_group(", "ranks=[0, 1]", "ranks=[2, 3]"]),
    waiting_in_a_circle: (3, 1, ["of ranks [1, 2]", "rank 2 called", "of ranks [0, 1, 2]"]),
}


@pytest.mark.parametrize("body", MISMATCHES, ids=lambda body: body.__name__)
def test_a_mismatch_names_the_first_rank_that_differs_on_every_rank(body):
    world_size, odd, parts = MISMATCHES[body]
    results = run_ranks(guarded, world_size, body, guard=False)
    assert {kind for kind, _ in results} == {"CollectiveMismatchError"}
    assert len({text for _, text in results}) == 1
    text = results[0][1]
    assert text.startswith(f"rank {odd} differs: it called ")
    assert all(part in text for part in parts), text
    assert f"{HERE}:" in text
    assert f"in {body.__name__}" in text


def guarded(rank, world_size, body, timeout_seconds=600.0):
    """The guard's own time-out lies beyond that of run_ranks: what only it would end fails the test."""
    return outcome(body, rank, world_size, timeout_seconds)


def leave_early(rank, world_size):
    for _ in range(3 if rank == 0 else 2):
        dist.all_reduce(torch.ones(1))


def fail_early(rank, world_size):
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        raise KeyError("prompt 7")
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_leaves_while_others_wait_is_named():
    results = run_ranks(guarded, 2, leave_early, guard=False)
    assert results[1][0] == "nothing"
    assert results[0][0] == "CollectiveMismatchError"
    assert "rank 1 has finished; its last collective was all_reduce(" in results[0][1]
    assert "call 2 of these ranks" in results[0][1]


def error_on_the_other_rank(rank, world_size):
    try:
        return guarded(rank, world_size, fail_early)
    except KeyError:
        return "own error"


def test_an_exception_on_one_rank_reaches_those_who_wait_for_it():
    waiting, failed = run_ranks(error_on_the_other_rank, 2, guard=False)
    assert failed == "own error"
    assert "rank 1 raised KeyError: 'prompt 7'" in waiting[1]


def stuck_until_others_gave_up(rank, world_size, folder):
    with collective_tag("rollout"):
        dist.all_reduce(torch.ones(1))
    if rank == 1:
        while len(list(folder.iterdir())) < world_size - 1:
            time.sleep(0.05)
        return
    try:
        dist.barrier()
    finally:
        (folder / str(rank)).touch()


def test_a_stuck_rank_is_named_with_its_last_tag_when_the_time_is_over(tmp_path):
    results = run_ranks(guarded, 3, partial(stuck_until_others_gave_up, folder=tmp_path), 2.0, guard=False)
    assert results[1][0] == "nothing"
    for kind, text in (results[0], results[2]):
        assert kind == "RankUnresponsiveError"
        assert text.startswith("rank 1 did not come to barrier() on group '0'")
        assert "it is alive" in text
        assert "its last collective was all_reduce(float32[1], op=sum) tagged 'rollout'" in text


def die_on_one(rank, world_size):
    for step in range(5):
        with collective_tag(f"step {step}"):
            dist.all_reduce(torch.ones(1))
    if rank == 1:
        os._exit(7)
    dist.barrier()


def test_a_dead_rank_is_named_with_its_last_tag_by_all_others():
    with pytest.raises(RuntimeError, match="rank 1 of 3 died") as caught:
        run_ranks(guarded, 3, die_on_one, guard=False)
    for rank in (0, 2):
        kind, text = caught.value.results[rank]
        assert kind == "RankUnresponsiveError"
        assert text.startswith("rank 1 did not come to barrier()")
        assert "no sign of life" in text
        assert "tagged 'step 4'" in text


def stop_on_one(rank, world_size):
    with collective_tag("update"):
        dist.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


@pytest.mark.slow
def test_a_stopped_rank_is_named_as_silent():
    results = run_until_stopped(3, 6.0)
    for kind, text in (results[0], results[2]):
        assert kind == "RankUnresponsiveError"
        assert text.startswith("rank 1 did not come to barrier()")
        assert "no sign of life" in text
        assert "tagged 'update'" in text


def run_until_stopped(world_size, timeout_seconds):
    with pytest.raises(TimeoutError, match="rank 1 of 3 did not finish") as caught:
        run_ranks(guarded, world_size, stop_on_one, timeout_seconds, timeout_seconds=60, guard=False)
    return caught.value.results


def uneven_but_right(rank, world_size):
    """Calls whose arguments differ between ranks as they may."""
    objects = [None] * world_size
    dist.all_gather_object(objects, "x" * (rank * 100))
    dist.gather_object(rank, objects if rank == 0 else None, dst=0)
    names = ["a", "b"] if rank == 0 else [None, None]
    dist.broadcast_object_list(names, src=0)
    received = torch.empty(2 * world_size)
    dist.all_to_all_single(received, torch.arange(2.0 * world_size) + rank)
    total = torch.tensor([rank])
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    one = dist.new_group([rank], use_local_synchronization=True)
    dist.barrier(group=one)
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(total, group=group)
    return [len(o) for o in objects if isinstance(o, str)], names, int(total)


def test_what_may_differ_between_ranks_is_no_mismatch():
    results = run_ranks(uneven_but_right, 3)
    for rank, (lengths, names, total) in enumerate(results):
        assert lengths == ([] if rank == 0 else [0, 100, 200])
        assert names == ["a", "b"]
        assert total == (6 if rank < 2 else 3)


def enter_and_leave(rank, world_size):
    """Guards one after the other, one inside another, and a function kept from inside."""
    originals = [module.all_reduce for module in (dist, dist.distributed_c10d)]
    value = torch.ones(1)
    for _ in range(2):
        with CollectiveGuard() as outer, CollectiveGuard() as inner:
            assert outer is not inner
            assert dist.all_reduce is not originals[0]
            kept = dist.all_reduce
            dist.all_reduce(value)
        assert [dist.all_reduce, dist.distributed_c10d.all_reduce] == originals
    kept(value)
    return float(value)


def test_outside_the_guard_nothing_of_torch_is_changed():
    assert run_ranks(enter_and_leave, 2, guard=False) == [8.0, 8.0]


def test_a_guard_needs_a_default_group():
    with pytest.raises(RuntimeError, match=r"enter CollectiveGuard inside distributed_session\(\)"), CollectiveGuard():
        pass


def test_a_guard_refuses_an_impossible_time_out():
    with pytest.raises(ValueError, match="timeout_seconds=0"):
        CollectiveGuard(timeout_seconds=0)
