import os
import pickle
import time

import pytest
import torch
import torch.distributed as dist

from rft_dist import CollectiveMismatchError
from rft_dist.testing import run_ranks


def total(rank, world_size, factor):
    value = torch.tensor([rank * factor])
    dist.all_reduce(value)
    return int(value), os.environ["RANK"], torch.get_num_threads()


def fail_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("no answer in prompt 7")
    dist.barrier()


def hang_on_one(rank, world_size):
    if rank == 1:
        time.sleep(600)


def die_on_one(rank, world_size):
    if rank == 1:
        os._exit(3)
    return "fine"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_returns_its_result(world_size):
    expected = 10 * sum(range(world_size))
    assert run_ranks(total, world_size, 10) == [(expected, str(rank), 1) for rank in range(world_size)]


def test_the_first_exception_is_raised_with_its_rank_and_traceback():
    with pytest.raises(ValueError, match=r"no answer in prompt 7 \[rank 1 of 2\]") as caught:
        run_ranks(fail_on_one, 2)
    assert any("in fail_on_one" in note for note in caught.value.__notes__)


def test_a_hung_rank_is_killed_and_named_with_its_stack():
    with pytest.raises(TimeoutError, match="rank 1 of 2 did not finish within 1 s") as caught:
        run_ranks(hang_on_one, 2, timeout_seconds=1)
    assert any("in hang_on_one" in note for note in caught.value.__notes__)


def test_a_dead_rank_is_named_and_the_others_results_kept():
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 died .*exit code 3") as caught:
        run_ranks(die_on_one, 2)
    assert caught.value.results == {0: "fine"}


class Answer:
    """A class of the test's own module, which no rank can import by name."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    __hash__ = None


def own_class(rank, world_size, answer, *, scale):
    return Answer(answer.value * scale + rank)


def test_classes_of_the_test_itself_travel_both_ways():
    assert run_ranks(own_class, 2, Answer(4), scale=10) == [Answer(40), Answer(41)]


def leave(rank, world_size):
    if rank == 1:
        raise SystemExit(4)


def test_a_rank_that_exits_does_not_end_the_caller():
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 raised SystemExit\(4\)"):
        run_ranks(leave, 2)


def return_a_lambda(rank, world_size):
    return lambda: rank


def test_a_result_that_cannot_travel_is_told():
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match=r"rank 0 of 1"):
        run_ranks(return_a_lambda, 1)


def mispair(rank, world_size):
    dist.all_reduce(torch.ones(1 + rank))


def test_ranks_run_under_the_guard():
    with pytest.raises(CollectiveMismatchError, match=r"rank 1 differs: it called all_reduce\(float32\[2\]"):
        run_ranks(mispair, 2)


def variables(rank, world_size):
    return os.environ["MADE_UP"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"]


def test_ranks_see_the_callers_environment_of_this_moment(monkeypatch):
    monkeypatch.setenv("MADE_UP", "now")
    assert run_ranks(variables, 2) == [("now", "2", "1")] * 2


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True])
def test_an_impossible_number_of_ranks_is_refused(world_size):
    with pytest.raises(ValueError, match="world_size="):
        run_ranks(total, world_size, 1)


def destroy_at_once(rank, world_size):
    dist.destroy_process_group()
    return rank


def test_no_rank_starts_before_all_have_connected():
    for _ in range(10):
        assert run_ranks(destroy_at_once, 4, guard=False) == [0, 1, 2, 3]
