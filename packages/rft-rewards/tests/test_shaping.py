import pytest

from rft_rewards import (
    IncompleteSampleError,
    RewardComputationEngine,
    RewardRecipe,
    RewardSample,
    length_penalty,
    overlong_penalty,
    repetition_penalty,
)


def _of_length(tokens):
    return RewardSample("text" * (tokens > 0), response_ids=tuple(range(tokens)))


def test_overlong_values():
    penalty = overlong_penalty(2048, 1024)
    assert [penalty.penalty(length) for length in (0, 1024, 1536, 2048, 5000)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert [overlong_penalty(2048, 1024, 0.5).penalty(length) for length in (1536, 2048)] == [-0.25, -0.5]
    small = overlong_penalty(100, 20)
    assert small([_of_length(length) for length in (70, 80, 90, 100, 120)]) == [0.0, 0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(("limit", "buffer"), [(100, 0), (100, -1), (100, 101)])
def test_overlong_buffer_is_checked_at_launch(limit, buffer):
    with pytest.raises(ValueError, match=f"buffer_tokens is {buffer}"):
        overlong_penalty(limit, buffer)


def test_overlong_shows_in_the_total():
    engine = RewardComputationEngine(
        RewardRecipe(functions=[lambda samples: [1.0] * len(samples), overlong_penalty(100, 20)])
    )
    (result,) = engine.compute([_of_length(90)])
    assert result.total == 0.5
    assert result.scores["overlong"] == -0.5


def test_length_needs_token_ids_only_where_it_is_used():
    with pytest.raises(IncompleteSampleError, match="response_ids is empty"):
        overlong_penalty(100, 20)([RewardSample("words")])
    assert overlong_penalty(100, 20)([RewardSample("")]) == [0.0]


def test_length_penalty_values():
    assert length_penalty(10, 0.1)([_of_length(length) for length in (0, 10, 15, 100)]) == [0.0, 0.0, -0.5, -1.0]
    assert length_penalty(0, 0.25, floor=-2.0)([_of_length(4), _of_length(40)]) == [-1.0, -2.0]
    with pytest.raises(ValueError, match="per_token is -1"):
        length_penalty(10, -1)


def test_repetition_penalty_values():
    repeated = RewardSample("", response_ids=(1, 2, 1, 2, 1, 2))  # windows 12 21 12 21 12: 2 distinct of 5
    assert repetition_penalty(2)([repeated]) == [-0.6]
    assert repetition_penalty(2, 0.5)([repeated]) == [-0.3]
    assert repetition_penalty(2)([RewardSample("", response_ids=(1, 2, 3)), RewardSample("a")]) == [0.0, 0.0]
    assert repetition_penalty(1)([RewardSample("no no no yes")]) == [-0.5]
    with pytest.raises(ValueError, match="window is 0"):
        repetition_penalty(0)
