from dataclasses import dataclass
from itertools import chain

import pytest

from rft_trainer.errors import ConfigurationError
from rft_trainer.experience.replay_buffer import Grouped, ReplayBuffer


@dataclass(frozen=True)
class Rollout:
    index: int
    group: int


def _buffer(count=10, group_size=2, **options):
    buffer = ReplayBuffer(**options)
    buffer.extend(Rollout(index, index // group_size) for index in range(count))
    return buffer


def _indices(batches):
    return [[item.index for item in batch] for batch in batches]


def test_every_item_once_per_epoch_and_the_last_batch_kept():
    batches = _indices(_buffer().mini_batches(4, epochs=3))
    assert [len(batch) for batch in batches] == [4, 4, 2] * 3
    for epoch in range(3):
        assert sorted(chain.from_iterable(batches[3 * epoch : 3 * epoch + 3])) == list(range(10))
    assert batches[:3] != batches[3:6]


def test_seed_decides_the_order():
    assert _indices(_buffer(seed=1).mini_batches(4)) == _indices(_buffer(seed=1).mini_batches(4))
    assert _indices(_buffer(seed=1).mini_batches(4)) != _indices(_buffer(seed=2).mini_batches(4))


def test_without_shuffling_the_order_is_that_of_insertion():
    assert _indices(_buffer(5, shuffle=False).mini_batches(2, epochs=2)) == [[0, 1], [2, 3], [4]] * 2


def test_groups_stay_whole_and_in_order():
    batches = list(_buffer(12, group_size=3, keep_groups=True).mini_batches(8))
    assert [len(batch) for batch in batches] == [6, 6]
    for batch in batches:
        assert [item.index % 3 for item in batch] == [0, 1, 2, 0, 1, 2]
    seen = [batch[start].group for batch in batches for start in (0, 3)]
    assert sorted(seen) == [0, 1, 2, 3]


def test_groups_of_different_sizes_fill_what_they_can():
    buffer = ReplayBuffer(keep_groups=True, shuffle=False)
    buffer.extend(Rollout(index, group) for index, group in enumerate([0, 0, 0, 1, 2, 2]))
    assert _indices(buffer.mini_batches(4)) == [[0, 1, 2, 3], [4, 5]]


def test_a_prompt_that_was_drawn_twice_makes_two_groups():
    buffer = ReplayBuffer(keep_groups=True, group_size=2, shuffle=False)
    buffer.extend(Rollout(index, prompt) for index, prompt in enumerate((7, 7, 8, 8, 7, 7)))
    assert sorted(_indices(buffer.mini_batches(2))) == [[0, 1], [2, 3], [4, 5]]


def test_group_larger_than_a_batch_raises_before_anything_is_drawn():
    with pytest.raises(ConfigurationError, match=r"a group of 3 .* mini-batches of 2"):
        _buffer(group_size=3, keep_groups=True).mini_batches(2)
    with pytest.raises(ConfigurationError, match="size 0"):
        _buffer().mini_batches(0)


def test_next_step_is_shuffled_differently_and_resumes():
    buffer = _buffer(seed=3)
    first = _indices(buffer.mini_batches(4))
    buffer.clear()
    assert len(buffer) == 0
    assert list(buffer.mini_batches(4)) == []
    buffer.extend(_buffer())
    second = _indices(buffer.mini_batches(4))
    assert first != second
    resumed = _buffer()
    resumed.load_state_dict(buffer.state_dict())
    assert _indices(resumed.mini_batches(4)) == second


def test_items_need_a_group():
    assert isinstance(Rollout(0, 0), Grouped)
    assert not isinstance(object(), Grouped)
