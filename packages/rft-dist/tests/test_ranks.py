import os
import time

import pytest
import torch
import torch.distributed as dist

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
