import pickle
import threading

import pytest
import torch
import torch.distributed as dist

from rft_dist import (
    GatherError,
    GatherPlan,
    ParallelLayout,
    RemoteError,
    all_gather_ragged,
    build_rollout_groups,
    gather_inputs,
    raise_together,
    slice_local,
)
from rft_dist.testing import run_ranks


def prompts(rank, count):
    """Prompts of different kinds: one rank has images, the others text only."""
    items = []
    for index in range(count):
        item = {"prompt_token_ids": (rank, index, 7), "text": f"prompt {index} of rank {rank}"}
        if rank % 2:
            item["image"] = torch.full((3, 2, 2), float(rank * 10 + index))
        items.append(item)
    return items


def share(rank, world_size, counts, samples):
    items = prompts(rank, counts[rank])
    gathered, plan = gather_inputs(items, dist.group.WORLD)
    with_images = any("image" in item for item in gathered)
    outputs = [(item["prompt_token_ids"], sample) for item in gathered for sample in range(samples)]
    images = [float(item["image"].mean()) for item in gathered if "image" in item]
    return plan, slice_local(outputs, plan, samples), with_images, images


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("counts", [(2,), (3, 1), (3, 2), (0, 2), (2, 2), (0, 0), (1, 0, 4, 2)])
def test_every_rank_gets_the_outputs_of_its_own_prompts(counts, samples):
    results = run_ranks(share, len(counts), counts, samples)
    for rank, (plan, own, with_images, images) in enumerate(results):
        assert plan == GatherPlan(counts, rank)
        assert own == [((rank, index, 7), sample) for index in range(counts[rank]) for sample in range(samples)]
        assert (with_images, images) == results[0][2:]
    assert results[0][2] == any(count for rank, count in enumerate(counts) if rank % 2)


def test_the_plan_is_data():
    plan = GatherPlan((3, 0, 2), 2)
    assert (plan.total, plan.offset, plan.count, plan.offsets) == (5, 3, 2, (0, 3, 3))
    assert slice_local(list("abcde"), plan) == ["d", "e"]
    assert slice_local(list("aAbBcCdDeE"), plan, 2) == ["d", "D", "e", "E"]
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize(
    ("outputs", "samples", "message"),
    [
        (4, 1, "4 outputs for 5 gathered items with 1 samples each: 5 were expected"),
        (5, 2, "5 outputs for 5 gathered items with 2 samples each: 10 were expected"),
        (5, 0, "samples_per_input=0 is no count"),
    ],
)
def test_outputs_that_do_not_fit_the_plan_are_refused(outputs, samples, message):
    with pytest.raises(ValueError, match=message):
        slice_local(list(range(outputs)), GatherPlan((3, 0, 2), 2), samples)


@pytest.mark.parametrize("arguments", [((3, -1), 0), ((3, 1), 2), ((3, 1), -1)])
def test_an_impossible_plan_is_refused(arguments):
    with pytest.raises(GatherError, match=r"counts=|index="):
        GatherPlan(*arguments)


class Counted:
    """Counts how often it is pickled."""

    pickled = 0

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        Counted.pickled += 1
        return Counted, (self.name,)


def pickle_count(rank, world_size):
    gathered, plan = gather_inputs([Counted("a"), Counted("b")], dist.group.WORLD)
    outputs = [item.name for item in gathered for _ in range(16)]
    return Counted.pickled, len(slice_local(outputs, plan, 16))


def test_each_prompt_travels_once_whatever_the_number_of_samples():
    assert run_ranks(pickle_count, 2) == [(2, 32)] * 2


def too_long(rank, world_size):
    """What an engine does with a prompt that does not fit: it raises on the rank that looks at it."""
    with build_rollout_groups(ParallelLayout(world_size, 2)) as groups:
        error = None
        if rank == 1:
            try:
                raise ValueError("prompt 3 has 5000 tokens, max_model_len is 4096")
            except ValueError as failure:
                error = failure
        try:
            raise_together(error, groups.tp_cpu)
        except ValueError as failure:
            return str(failure), "\n".join(failure.__notes__)
        return "no error in this group"


def test_an_exception_on_one_rank_reaches_its_whole_group_with_its_origin():
    first, second, *others = run_ranks(too_long, 4)
    message = "prompt 3 has 5000 tokens, max_model_len is 4096 [raised on rank 1, position 1 of 2 in its group]"
    assert first[0] == second[0] == message
    assert "in too_long" in first[1]
    assert others == ["no error in this group"] * 2


class OnlyHereError(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def several_errors(rank, world_size):
    error = OnlyHereError("a lock", "a key") if rank == 1 else KeyError("late") if rank == 3 else None
    try:
        raise_together(error)
    except (OnlyHereError, RemoteError) as failure:
        return type(failure).__name__, str(failure)


def test_the_first_failing_rank_is_raised_and_what_cannot_travel_is_told():
    results = run_ranks(several_errors, 4)
    origin = "[raised on rank 1, position 1 of 4 in its group]"
    assert results[1] == ("OnlyHereError", f"a lock and a key {origin}")
    assert results[0] == results[2] == results[3] == ("RemoteError", f"OnlyHereError: a lock and a key {origin}")


def bad_items(rank, world_size, fault):
    items = ["fine"]
    if rank == 1:
        items = {"lock": [threading.Lock()], "generator": broken_source()}[fault]
    try:
        gather_inputs(items, dist.group.WORLD)
    except (TypeError, RuntimeError) as failure:
        return type(failure).__name__, str(failure)


def broken_source():
    yield "one"
    raise RuntimeError("the loader's file is gone")


@pytest.mark.parametrize(
    ("fault", "name", "text"), [("lock", "TypeError", "cannot pickle"), ("generator", "RuntimeError", "file is gone")]
)
def test_items_that_cannot_be_sent_are_an_error_on_all_ranks(fault, name, text):
    results = run_ranks(bad_items, 3, fault)
    assert len(set(results)) == 1
    assert results[0][0] == name
    assert text in results[0][1]
    assert "raised on rank 1" in results[0][1]


def test_without_a_process_group_this_process_is_a_world_of_one():
    gathered, plan = gather_inputs(["a", "b"], None)
    assert gathered == ["a", "b"]
    assert plan == GatherPlan((2,), 0)
    with pytest.raises(KeyError, match=r"^'alone'$"):
        raise_together(KeyError("alone"))
    raise_together(None)


RAGGED = {
    "growing": [(0, 3), (1, 3), (2, 3), (5, 3)],
    "one holds all": [(0, 2), (100, 2), (0, 2), (0, 2)],
    "all empty": [(0, 4), (0, 4)],
    "empty rows": [(2, 0), (3, 0)],
    "flat": [(4,), (2,)],
    "alone": [(3, 2)],
}


def ragged_value(rank, shape, dtype):
    count = torch.Size(shape).numel()
    return (torch.arange(count) + 100 * rank).reshape(shape).to(dtype)


def ragged(rank, world_size, shapes, dtype):
    value = ragged_value(rank, shapes[rank], dtype)
    if value.is_floating_point():
        value.requires_grad_(True)
    gathered = all_gather_ragged(value.mT.contiguous().mT if value.dim() == 2 else value)
    return [(part.requires_grad, part) for part in gathered]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_tensors_arrive_whole_on_every_rank(name, dtype):
    shapes = RAGGED[name]
    for gathered in run_ranks(ragged, len(shapes), shapes, dtype):
        for rank, (requires_grad, part) in enumerate(gathered):
            assert not requires_grad
            torch.testing.assert_close(part, ragged_value(rank, shapes[rank], dtype), rtol=0, atol=0)


def ragged_error(rank, world_size, tensors):
    try:
        all_gather_ragged(tensors[rank])
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (torch.zeros(2, 4), r"position 1 has torch.float32 \(2, 4\), position 0 has torch.float32 \(2, 3\)"),
        (torch.zeros(2, 3, dtype=torch.int64), "only the first dimension may differ"),
        (torch.zeros(6), "only the first dimension may differ"),
        (torch.tensor(1.0), "reshape a scalar to"),
        (torch.zeros(2, 3).to_sparse(), "give a dense tensor"),
    ],
)
def test_ragged_tensors_that_do_not_fit_are_an_error_on_all_ranks(second, message):
    first, other = run_ranks(ragged_error, 2, [torch.zeros(2, 3), second])
    assert first == other
    with pytest.raises(ValueError, match=message):
        raise ValueError(first)
