import pytest
import torch
from torch.testing import assert_close

from rft_trainer.experience.packing import pack, unpack
from rft_trainer.models import padded_layout
from rft_trainer.models.log_probs import chunked_log_probs
from rft_trainer.models.padding import right_pad


def test_layout_of_a_packed_batch():
    batch = pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])])
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.position_ids.dtype == torch.int64
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1, 1]]
    assert batch.cumulative_lengths.tolist() == [0, 3, 5]
    assert batch.cumulative_lengths.dtype == torch.int32
    assert batch.longest == 3
    assert batch.attention_mask()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_prediction_columns_stand_one_before_their_tokens():
    batch = pack([torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), torch.tensor([7, 8])])
    index = batch.prediction_index([1, 2, 0])
    assert index.tolist() == [1, 3, 4]
    assert batch.input_ids[0, index + 1].tolist() == [3, 5, 6]
    rows, mask = unpack(batch.input_ids[0, index + 1], [1, 2, 0])
    assert rows.tolist() == [[3, 0], [5, 6], [0, 0]]
    assert mask.int().tolist() == [[1, 0], [1, 1], [0, 0]]


def test_unpack_inverts_pack():
    rows = [torch.arange(4), torch.arange(2), torch.arange(3)]
    values, mask = unpack(pack(rows).input_ids, [4, 2, 3], value=-1)
    assert values.tolist() == [[0, 1, 2, 3], [0, 1, -1, -1], [0, 1, 2, -1]]
    assert mask.sum(dim=1).tolist() == [4, 2, 3]


def test_gradients_flow_through_unpack():
    flat = torch.ones(5, requires_grad=True)
    values, _ = unpack(flat, [3, 2])
    (values * torch.tensor([[1.0, 2, 3], [4, 5, 6]])).sum().backward()
    assert flat.grad.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_cannot_be_packed_raises():
    with pytest.raises(ValueError, match=r"\[2, 0\]"):
        pack([torch.tensor([1, 2]), torch.tensor([], dtype=torch.long)])
    with pytest.raises(ValueError, match=r"\[\]"):
        pack([])
    batch = pack([torch.tensor([1, 2])])
    with pytest.raises(ValueError, match="at least one prompt token"):
        batch.prediction_index([2])
    with pytest.raises(ValueError, match="2 response lengths for 1"):
        batch.prediction_index([1, 1])
    with pytest.raises(ValueError, match="5 packed values"):
        unpack(torch.zeros(5), [2, 2])


@pytest.fixture(scope="module", params=["rotary", "absolute"])
def model(request):
    from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

    torch.manual_seed(0)
    if request.param == "absolute":
        config = GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=64, attn_implementation="sdpa")
        return GPT2Model(config).eval()
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return LlamaModel(config).eval()


def test_packed_and_padded_rows_give_the_numbers_of_single_rows(model):
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 31, (size,), generator=generator) for size in (3, 6, 1)]
    responses = [torch.randint(1, 31, (size,), generator=generator) for size in (4, 1, 5)]
    head = torch.randn(31, 16, generator=generator)
    rows = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    alone = []
    for row, response in zip(rows, responses, strict=True):
        hidden = model(input_ids=row[None], use_cache=False).last_hidden_state
        alone.append(chunked_log_probs(hidden[0, -len(response) - 1 : -1], head, response))
    expected, mask = right_pad(alone, 0.0)

    batch = pack(rows)
    index = batch.prediction_index([len(response) for response in responses])
    for attention in (batch.attention_mask(), None):
        hidden = model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=attention, use_cache=False
        ).last_hidden_state
        flat = chunked_log_probs(hidden[0, index], head, batch.input_ids[0, index + 1], chunk_tokens=3)
        packed, packed_mask = unpack(flat, [len(response) for response in responses])
        assert packed_mask.equal(mask)
        assert_close(packed, expected, atol=1e-4, rtol=0)

    for side in ("left", "right"):
        layout = padded_layout(prompts, responses, 0, side=side)
        hidden = model(
            input_ids=layout.input_ids,
            attention_mask=layout.attention_mask,
            position_ids=layout.position_ids,
            use_cache=False,
        ).last_hidden_state
        padded = chunked_log_probs(hidden.flatten(0, 1)[layout.predictors], head, layout.labels)
        assert_close(padded * layout.mask, expected, atol=1e-4, rtol=0)
