"""The order of items over ranks, epochs and restarts."""

import pytest
from rft_trainer.data import DataSampler
from rft_trainer.errors import ConfigurationError


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(world):
    alone = DataSampler(10, 4, seed=3)
    ranks = [DataSampler(10, 4, rank=r, world_size=world, seed=3) for r in range(world)]
    for _ in range(7):
        assert [item for sampler in ranks for item in sampler.next_batch()] == alone.next_batch()


def test_every_item_once_per_epoch_and_a_new_order_each_time():
    sampler = DataSampler(10, 4, seed=1)
    drawn = [item for _ in range(15) for item in sampler.next_batch()]
    epochs = [drawn[i : i + 10] for i in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_resume_continues_where_it_stopped():
    # 10 items, batch 2, stopped after step 7: epoch 1, and steps 8 to 15 are those of an unbroken run
    unbroken = DataSampler(10, 2, seed=0)
    expected = [unbroken.next_batch() for _ in range(15)]
    first = DataSampler(10, 2, seed=0)
    assert [first.next_batch() for _ in range(7)] == expected[:7]
    second = DataSampler(10, 2, seed=0)
    second.load_state_dict(first.state_dict())
    assert second.epoch == 1
    assert [second.next_batch() for _ in range(8)] == expected[7:]
    with pytest.raises(ConfigurationError, match="size=10.*size=11"):
        DataSampler(11, 2, seed=0).load_state_dict(first.state_dict())


def test_without_shuffle_and_with_impossible_numbers():
    assert DataSampler(3, 2, shuffle=False).next_batch() == [0, 1]
    with pytest.raises(ConfigurationError, match="at least one item"):
        DataSampler(0, 2)
    with pytest.raises(ConfigurationError, match="multiple of the 2"):
        DataSampler(4, 3, world_size=2)
