import pytest
import torch

from rft_trainer.experience.batches import (
    cut_at_stop,
    join_prompt_response,
    left_pad,
    position_ids_from_mask,
    response_hidden,
    right_pad,
    unpad,
)

ROWS = [torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([], dtype=torch.long)]


def test_padding_on_both_sides():
    ids, mask = left_pad(ROWS, 0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 0, 0]]
    assert mask.int().tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 0]]
    ids, mask = right_pad(ROWS, 9, length=4)
    assert ids.tolist() == [[5, 6, 7, 9], [8, 9, 9, 9], [9, 9, 9, 9]]
    assert mask.sum(dim=1).tolist() == [3, 1, 0]


@pytest.mark.parametrize("pad", [left_pad, right_pad])
def test_unpad_is_the_inverse(pad):
    assert [row.tolist() for row in unpad(*pad(ROWS, 0))] == [row.tolist() for row in ROWS]


def test_pad_id_that_ends_sequences_stays_in_the_mask():
    ids, mask = right_pad([torch.tensor([5, 6, 2]), torch.tensor([8, 6, 9, 1, 1])], 2)
    assert ids[0].tolist() == [5, 6, 2, 2, 2]
    assert mask[0].int().tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("ids", "stops", "expected", "truncated"),
    [
        ([3, 4, 9, 0], [9], [3, 4, 9], False),
        ([2, 3, 4, 5, 6], [9], [2, 3, 4, 5, 6], True),
        ([9, 0, 0, 0], [9], [9], False),
        ([3, 9, 5, 9], [9], [3, 9], False),
        ([5, 6, 2, 2, 2], [2], [5, 6, 2], False),
        ([5, 7, 8], [8, 7], [5, 7], False),
        ([], [9], [], True),
    ],
)
def test_response_ends_at_its_first_stop_token(ids, stops, expected, truncated):
    kept, flag = cut_at_stop(torch.tensor(ids, dtype=torch.long), stops)
    assert (kept.tolist(), flag) == (expected, truncated)


def test_rows_that_do_not_fit_raise():
    with pytest.raises(ValueError, match="3 tokens does not fit into 2"):
        left_pad(ROWS, 0, length=2)
    with pytest.raises(ValueError, match="no rows"):
        right_pad([], 0)
    with pytest.raises(ValueError, match="must begin with the shape"):
        unpad(torch.zeros(2, 3), torch.ones(2, 4))


def test_positions_count_real_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    positions = position_ids_from_mask(mask)
    assert positions.tolist() == [[0, 0, 0, 1, 2], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert positions.dtype == torch.int64


def test_prompts_and_responses_meet_in_one_column():
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    responses = [torch.tensor([5]), torch.tensor([6, 7])]
    ids, attention, response_mask = join_prompt_response(prompts, responses, 0)
    assert ids.tolist() == [[1, 2, 3, 5, 0], [0, 0, 4, 6, 7]]
    assert attention.int().tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert response_mask.int().tolist() == [[1, 0], [1, 1]]
    # the tokens whose hidden states predict the responses: the one in front of each
    assert response_hidden(ids, 2).tolist() == [[3, 5], [4, 6]]


def test_bad_joins_raise():
    with pytest.raises(ValueError, match="BOS"):
        join_prompt_response([torch.tensor([], dtype=torch.long)], [torch.tensor([1])], 0)
    with pytest.raises(ValueError, match="2 prompts and 1 responses"):
        join_prompt_response([torch.tensor([1])] * 2, [torch.tensor([1])], 0)
    with pytest.raises(ValueError, match="4 response tokens"):
        response_hidden(torch.zeros(2, 4), 4)
