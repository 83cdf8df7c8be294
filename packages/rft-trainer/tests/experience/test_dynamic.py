"""Dynamic sampling: groups are judged whole and by raw scores, the batch fills up, nothing is lost, ranks agree."""

import itertools
import threading

import pytest
import torch

from rft_trainer.experience import Experience
from rft_trainer.experience.dynamic import DynamicSampling, GroupFilter

SIZE = 4


class Alone:
    """One rank."""

    rank, size = 0, 1

    def gather(self, values):
        return [list(values)]


class Together:
    """Ranks in threads, whose only collective is `gather`."""

    def __init__(self, rank, size, barrier, seen):
        self.rank, self.size, self._barrier, self._seen = rank, size, barrier, seen

    def gather(self, values):
        self._seen[self.rank] = list(values)
        self._barrier.wait()
        gathered = list(self._seen)
        self._barrier.wait()
        return gathered


def group(item, scores, penalty=0.0):
    return [
        Experience(
            group=item,
            prompt_ids=torch.tensor([1]),
            response_ids=torch.tensor([2]),
            response_mask=torch.ones(1, dtype=torch.bool),
            engine_log_probs=torch.zeros(1),
            weights_version=1,
            truncated=False,
            score=score,
            reward=score + penalty,
        )
        for score in scores
    ]


def sampler(batch):
    numbers = itertools.count()
    return lambda: list(itertools.islice(numbers, batch))


def dynamic(wanted=2, rounds=8, batch=2, said=None, **bounds):
    config = GroupFilter(group_size=SIZE, wanted=wanted, rounds=rounds, **bounds)
    said = [] if said is None else said
    return DynamicSampling(config, data=Alone(), draw=sampler(batch), say=said.append)


def test_a_rank_whose_data_has_run_out_joins_every_round_and_stops_with_the_others():
    size = 2
    barrier, seen, results = threading.Barrier(size, timeout=60), [[] for _ in range(size)], [None] * size

    def rank(number):
        shares = [[[0], [1], [2], [3]], [[], [], [], []]][number]
        config = GroupFilter(group_size=SIZE, wanted=2, rounds=4)
        sampling = DynamicSampling(
            config, data=Together(number, size, barrier, seen), draw=lambda: shares.pop(0), say=lambda text: None
        )
        rollout = lambda items, _: [e for item in items for e in group(item, MIXED if item in (1, 3) else RIGHT)]  # noqa: E731
        experiences, metrics = sampling.collect(1, rollout)
        results[number] = (
            [e.group for e in experiences[::SIZE]],
            metrics["rollout/sampling_rounds"].value,
            len(shares),
        )

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [([1, 3], 4.0, 0), ([], 4.0, 0)]


MIXED, RIGHT, WRONG = [1.0, 1.0, 0.0, 0.0], [1.0] * 4, [0.0] * 4


def scored(table, seen):
    """A rollout whose group scores come from `table` by item; `seen` collects the items."""

    def rollout(items, number):
        seen.append(list(items))
        return [e for item in items for e in group(item, table[item])]

    return rollout


def test_it_goes_on_until_the_batch_is_full_and_surplus_prompts_come_first_next_time():
    table = {0: RIGHT, 1: MIXED, 2: WRONG, 3: WRONG, 4: MIXED, 5: MIXED, 6: MIXED, 7: MIXED}
    sampling, seen = dynamic(), []
    experiences, metrics = sampling.collect(1, scored(table, seen))
    assert seen == [[0, 1], [2, 3], [4, 5]]
    assert [e.group for e in experiences] == [1] * 4 + [4] * 4
    assert (metrics["rollout/kept_groups"].total, metrics["rollout/kept_groups"].count) == (3, 6)
    assert metrics["rollout/sampled_score"].total == 4 + 3 * 2
    assert sampling.state_dict() == {"waiting": [5]}
    resumed = dynamic()
    resumed.load_state_dict(sampling.state_dict())
    assert resumed.state_dict() == {"waiting": [5]}
    seen.clear()
    experiences, _ = sampling.collect(2, scored(table, seen))
    assert seen == [[5, 6, 7]]
    assert [e.group for e in experiences[::SIZE]] == [5, 6]


def test_a_penalty_on_one_response_makes_no_group_informative():
    rollout = lambda items, number: [e for item in items for e in group(item, RIGHT)]  # noqa: E731
    said = []
    experiences, _ = dynamic(rounds=2, said=said).collect(3, rollout)
    assert experiences == []
    assert said == [
        "step 3: 0 of 2 groups with different scores after 2 rounds of sampling; training on those. "
        "Raise dynamic_sampling_rounds, or change the difficulty of the prompts"
    ]


def test_one_round_filters_without_a_word():
    said = []
    experiences, _ = dynamic(rounds=1, said=said).collect(1, scored({0: RIGHT, 1: MIXED}, []))
    assert [e.group for e in experiences] == [1] * 4
    assert said == []


@pytest.mark.parametrize(("bounds", "kept"), [({"lowest_mean": 0.4}, [1, 2]), ({"highest_mean": 0.5}, [0, 1])])
def test_difficulty(bounds, kept):
    table = {0: [1.0, 0, 0, 0], 1: [1.0, 1, 0, 0], 2: [1.0, 1, 1, 0]}
    experiences, _ = dynamic(wanted=3, batch=3, rounds=1, **bounds).collect(1, scored(table, []))
    assert [e.group for e in experiences[::SIZE]] == kept


def test_a_prompt_that_comes_round_again_is_trained_on_once():
    config = GroupFilter(group_size=SIZE, wanted=3, rounds=3)
    sampling = DynamicSampling(config, data=Alone(), draw=lambda: [7, 8], say=lambda text: None)
    experiences, _ = sampling.collect(1, scored({7: MIXED, 8: MIXED}, []))
    assert [e.group for e in experiences[::SIZE]] == [7, 8]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_waited_goes_first_for_every_number_of_ranks(size):
    barrier, seen = threading.Barrier(size, timeout=60), [[] for _ in range(size)]
    results = [None] * size

    def rank(number):
        draw = sampler(4)
        share = 4 // size
        mine = lambda: draw()[number * share : (number + 1) * share]  # noqa: E731
        config = GroupFilter(group_size=SIZE, wanted=4, rounds=2)
        data = Together(number, size, barrier, seen)
        sampling = DynamicSampling(config, data=data, draw=mine, say=lambda text: None)
        sampling.load_state_dict({"waiting": [102, 101, 103]})
        rollout = lambda items, _: [e for item in items for e in group(item, MIXED)]  # noqa: E731
        experiences, _ = sampling.collect(1, rollout)
        results[number] = ([e.group for e in experiences[::SIZE]], sampling.state_dict()["waiting"])

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(item for items, _ in results for item in items) == [0, 101, 102, 103]
    assert all(waiting == [1, 2, 3] for _, waiting in results)
