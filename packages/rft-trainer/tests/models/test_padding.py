import pytest
import torch

from rft_trainer.models.padding import left_pad, position_ids_from_mask, right_pad, unpad

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
