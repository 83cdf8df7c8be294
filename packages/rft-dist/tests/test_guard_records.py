import pytest

from rft_dist.guard.records import Obstacle, Pulse, RankRecord, RankState, find_obstacle, first_different, mismatch_text


def waiting(*ranks, sequence=1, calls=1, met=None):
    return RankRecord(
        beat=1, calls=calls, state=RankState.WAITING, ranks=ranks, sequence=sequence, call="call", met=met or {}
    )


RUNNING = RankRecord(beat=1, calls=1)
LEFT = RankRecord(beat=1, calls=1, state=RankState.LEFT)
FAILED = RankRecord(beat=1, calls=1, state=RankState.FAILED, error="ValueError: no")

SITUATIONS = {
    "all have come": ({0: waiting(0, 1), 1: waiting(0, 1)}, None),
    "one is busy": ({0: waiting(0, 1), 1: RUNNING}, Obstacle(kind="running", ranks=(1,))),
    "one has shown nothing": ({0: waiting(0, 1)}, Obstacle(kind="running", ranks=(1,))),
    "one has left": ({0: waiting(0, 1), 1: LEFT}, Obstacle(kind="ended", ranks=(1,))),
    "one has failed behind another": (
        {0: waiting(0, 1), 1: waiting(1, 2), 2: FAILED},
        Obstacle(kind="ended", ranks=(2,)),
    ),
    "two in different groups": (
        {0: waiting(0, 1), 1: waiting(0, 1, 2), 2: RUNNING},
        Obstacle(kind="deadlock", ranks=(0, 1)),
    ),
    "a circle of three": (
        {0: waiting(0, 1), 1: waiting(1, 2), 2: waiting(0, 2)},
        Obstacle(kind="deadlock", ranks=(0, 1, 2)),
    ),
    "a circle that this rank only waits for": (
        {0: waiting(0, 1), 1: waiting(1, 2), 2: waiting(1, 2, 3), 3: RUNNING},
        Obstacle(kind="deadlock", ranks=(1, 2)),
    ),
    "one that seems to wait where this rank has passed": (
        {0: waiting(0, 1, sequence=2, met={"0,1": 2}), 1: waiting(0, 1, sequence=1)},
        Obstacle(kind="running", ranks=(1,)),
    ),
    "one that seems to wait where another has passed": (
        {0: waiting(0, 1), 1: waiting(1, 2), 2: RankRecord(met={"1,2": 1})},
        Obstacle(kind="running", ranks=(1,)),
    ),
    "one that waits where another has failed": (
        {0: waiting(0, 1), 1: waiting(1, 2), 2: RankRecord(met={"1,2": 1}, state=RankState.FAILED)},
        Obstacle(kind="ended", ranks=(2,)),
    ),
    "a chain that ends in a busy rank": (
        {0: waiting(0, 1), 1: waiting(1, 2), 2: RUNNING},
        Obstacle(kind="running", ranks=(2,)),
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_who_is_in_the_way(name):
    records, expected = SITUATIONS[name]
    assert find_obstacle(0, records) == expected


@pytest.mark.parametrize(
    ("calls", "odd"),
    [("aab", 2), ("baa", 0), ("aba", 1), ("ab", 1), ("abc", 1), ("aabb", 2), ("abbb", 0)],
)
def test_the_first_rank_that_differs_is_the_lowest_outside_the_majority(calls, odd):
    assert first_different(dict(enumerate(calls))) == odd


def test_a_mismatch_is_told_with_the_others_grouped_by_what_they_called():
    text = mismatch_text({4: "x", 5: "y", 6: "x", 7: "z"}, {4: 1, 5: 2, 6: 1, 7: 3})
    assert text.startswith("rank 5 differs: it called y; rank 4, 6 called x; rank 7 called z; ")


def test_a_rank_is_silent_when_its_beat_stands_still():
    pulse = Pulse()
    pulse.observe({0: RankRecord(beat=1), 1: RankRecord(beat=1)}, 0.0)
    pulse.observe({0: RankRecord(beat=2), 1: RankRecord(beat=1)}, 3.0)
    assert pulse.silent([0, 1, 2], 5.0, 4.0) == (1,)
    assert pulse.silent([0, 1, 2], 8.0, 4.0) == (0, 1)


def test_a_record_survives_the_store():
    record = RankRecord(beat=3, calls=9, state=RankState.FAILED, ranks=(0, 2), sequence=4, call="x", error="E: y")
    assert RankRecord.from_json(record.to_json()) == record
