import json
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from rft_dist import raise_together, run_on_first_rank
from rft_dist.testing import run_ranks


def save_once(rank, world_size, folder, fault):
    """Four ranks save into one new folder; the first is slow, or fails."""

    def write():
        time.sleep(0.5)
        target = Path(folder) / "step-4"
        target.mkdir()
        (target / "state.json").write_text(json.dumps({"rank": rank}))
        if fault:
            raise OSError(28, "No space left on device", str(target))
        return target.name

    try:
        name = run_on_first_rank(write)
    except OSError as error:
        return error.errno, str(error), any("raised on rank 0" in note for note in error.__notes__)
    return name, (Path(folder) / name / "state.json").exists()


def test_work_of_the_first_rank_is_done_once_and_awaited_by_all(tmp_path):
    assert run_ranks(save_once, 4, str(tmp_path), False) == [("step-4", True)] * 4
    assert json.loads((tmp_path / "step-4" / "state.json").read_text()) == {"rank": 0}


def test_a_failure_of_the_first_rank_is_raised_on_all(tmp_path):
    results = run_ranks(save_once, 4, str(tmp_path), True)
    assert results == [(28, f"[Errno 28] No space left on device: '{tmp_path / 'step-4'}'", True)] * 4


def nested(rank, world_size):
    """An error that passes two agreements keeps its first origin."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    error = None
    try:
        raise_together(ValueError("bad answer") if rank == 2 else None, pair)
    except ValueError as failure:
        error = failure
    try:
        raise_together(error)
    except ValueError as failure:
        return str(failure)


def test_an_error_keeps_its_first_origin():
    assert run_ranks(nested, 4) == ["bad answer [raised on rank 2, position 0 of 2 in its group]"] * 4


def result_that_cannot_travel(rank, world_size):
    try:
        run_on_first_rank(lambda: lambda: 1)
    except (AttributeError, TypeError) as error:
        return str(error)


def test_a_result_that_cannot_travel_is_an_error_on_all():
    first, second = run_ranks(result_that_cannot_travel, 2)
    assert first == second
    assert "raised on rank 0" in first


def test_alone_the_action_just_runs():
    assert run_on_first_rank(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        run_on_first_rank(lambda: 1 // 0)
