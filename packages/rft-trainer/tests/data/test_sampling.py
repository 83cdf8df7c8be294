"""The data order: seeded, shared without loss or repetition, the same after a resume (also on other ranks)."""

import json

import pytest

from rft_trainer.data import DataSampler
from rft_trainer.errors import ConfigurationError


def steps(sampler, count):
    return [sampler.next_batch() for _ in range(count)]


def test_each_epoch_has_every_item_once_in_a_new_order():
    sampler = DataSampler(10, batch_size=2, seed=3)
    epochs = [[index for batch in sampler.epoch_batches() for index in batch] for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = DataSampler(10, batch_size=2, seed=3)
    assert [index for batch in again.epoch_batches() for index in batch] == epochs[0]
    other = DataSampler(10, batch_size=2, seed=4)
    assert [index for batch in other.epoch_batches() for index in batch] != epochs[0]


def test_the_order_is_pinned():
    # A change of this order would break every resume across versions.
    assert steps(DataSampler(6, batch_size=3, seed=0), 2) == [[0, 4, 3], [1, 5, 2]]


def test_last_smaller_batch_is_kept_or_dropped():
    kept = DataSampler(10, batch_size=4, shuffle=False)
    assert kept.steps_per_epoch == 3
    assert list(kept.epoch_batches()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    dropped = DataSampler(10, batch_size=4, shuffle=False, drop_last=True)
    assert dropped.steps_per_epoch == 2
    assert list(dropped.epoch_batches()) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_evaluation_counts_each_of_1319_items_once(num_ranks):
    ranks = [
        DataSampler(1319, batch_size=64, rank=rank, num_ranks=num_ranks, shuffle=False) for rank in range(num_ranks)
    ]
    batches = [list(rank.epoch_batches()) for rank in ranks]
    assert {len(batch) for batch in batches} == {21}  # the same number of steps on every rank, so no rank waits
    assert [index for step in zip(*batches, strict=True) for share in step for index in share] == list(range(1319))


def test_a_last_batch_smaller_than_the_ranks_gives_empty_shares():
    ranks = [DataSampler(5, batch_size=4, rank=rank, num_ranks=4, shuffle=False) for rank in range(4)]
    assert [steps(rank, 2) for rank in ranks] == [[[0], [4]], [[1], []], [[2], []], [[3], []]]


def test_batches_are_the_same_for_every_number_of_ranks():
    alone = steps(DataSampler(11, batch_size=4, seed=1), 9)
    ranks = [DataSampler(11, batch_size=4, seed=1, rank=rank, num_ranks=2) for rank in range(2)]
    shares = [steps(rank, 9) for rank in ranks]
    assert [first + second for first, second in zip(*shares, strict=True)] == alone


def test_resume_continues_the_order():
    whole = DataSampler(10, batch_size=2, seed=5)
    batches = steps(whole, 15)
    assert whole.epoch == 3
    stopped = DataSampler(10, batch_size=2, seed=5)
    steps(stopped, 7)
    assert stopped.epoch == 1
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = DataSampler(10, batch_size=2, seed=5)
    resumed.load_state_dict(state)
    assert resumed.epoch == 1
    assert steps(resumed, 8) == batches[7:]


def test_resume_on_another_number_of_ranks():
    alone = DataSampler(10, batch_size=4, seed=5)
    batches = steps(alone, 6)
    stopped = DataSampler(10, batch_size=4, seed=5)
    steps(stopped, 4)
    ranks = [DataSampler(10, batch_size=4, seed=5, rank=rank, num_ranks=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(stopped.state_dict())
    shares = [steps(rank, 2) for rank in ranks]
    assert [first + second for first, second in zip(*shares, strict=True)] == batches[4:]


def test_resume_at_the_end_of_an_epoch_begins_the_next():
    stopped = DataSampler(4, batch_size=2, seed=5)
    list(stopped.epoch_batches())
    resumed = DataSampler(4, batch_size=2, seed=5)
    resumed.load_state_dict(stopped.state_dict())
    assert (resumed.epoch, len(list(resumed.epoch_batches()))) == (1, 2)


def test_resume_names_what_changed():
    state = DataSampler(10, batch_size=2, seed=5).state_dict()
    with pytest.raises(ConfigurationError, match=r"size was 10 and is 12; batch_size was 2 and is 4"):
        DataSampler(12, batch_size=4, seed=5).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0, "batch_size": 1}, "size is 0"),
        ({"size": 1, "batch_size": 0}, "batch_size is 0"),
        ({"size": 4, "batch_size": 4, "rank": 2, "num_ranks": 2}, r"rank is 2, outside 0\.\.1"),
        ({"size": 4, "batch_size": 3, "num_ranks": 2}, "batch_size 3 cannot be shared by 2 data ranks"),
        ({"size": 3, "batch_size": 4, "drop_last": True}, "3 prompts do not fill one batch of 4"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ConfigurationError, match=message):
        DataSampler(**options)
