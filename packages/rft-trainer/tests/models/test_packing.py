"""Packed rows: no padding, restarting positions, and the numbers of each row alone, on two families of models."""

import pytest
import torch
from torch.testing import assert_close

from rft_trainer.errors import UnsupportedCombination
from rft_trainer.models import packed_layout
from rft_trainer.models.actor import decode
from rft_trainer.models.packing import PACKED_ATTENTION, attend_packed, packed_attention


def rows(*texts):
    return [torch.tensor(text, dtype=torch.long) for text in texts]


def test_layout_of_packed_rows():
    layout = packed_layout(rows([1, 2], [4, 5, 6], [7]), rows([3], [], [8, 9]), pad_token_id=0)
    assert layout.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 2]]
    assert layout.position_ids.dtype == torch.int64
    assert layout.cumulative_lengths.tolist() == [0, 3, 6, 9]
    assert layout.cumulative_lengths.dtype == torch.int32
    assert layout.longest == 3
    assert layout.mask.tolist() == [[True, False], [False, False], [True, True]]
    flat = layout.input_ids[0]
    assert flat[layout.predictors[layout.mask]].tolist() == [2, 7, 8]
    assert layout.labels[layout.mask].tolist() == [3, 8, 9]


def family(kind, window=None):
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    torch.manual_seed(0)
    if kind == "absolute":
        config = GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=64, attn_implementation="sdpa")
        return GPT2LMHeadModel(config).eval()
    shape = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_implementation": "sdpa",
    }
    if kind == "window":
        return MistralForCausalLM(MistralConfig(**shape, sliding_window=3)).eval()
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


@pytest.mark.parametrize("kind", ["rotary", "absolute", "window"])
def test_packed_rows_give_the_hidden_states_of_single_rows(kind):
    model = family(kind)
    lengths = (7, 2, 9, 1)
    texts = [torch.randint(1, 31, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    alone = [model.get_decoder()(input_ids=text[None], use_cache=False)[0][0] for text in texts]
    layout = packed_layout([text[:1] for text in texts], [text[1:] for text in texts], 0)
    packed = decode(model.get_decoder(), layout)[0][0]
    assert_close(packed, torch.cat(alone), atol=1e-5, rtol=0)
    # and batches of another layout keep their numbers afterwards
    after = model.get_decoder()(input_ids=texts[0][None], use_cache=False)[0][0]
    assert_close(after, alone[0], atol=1e-6, rtol=0)


def test_no_square_mask_is_made(monkeypatch):
    model = family("rotary")
    seen = []

    def watching(module, query, key, value, attention_mask, **options):
        seen.append(tuple(attention_mask.shape))
        return packed_attention(module, query, key, value, attention_mask, **options)

    attend_packed(model)
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, watching)
    try:
        decode(model.get_decoder(), packed_layout(rows([1, 2], [3]), rows([4], [5, 6]), 0))
    finally:
        AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    assert seen == [(1, 1, 1, 1)] * 2


def test_a_model_on_another_attention_is_refused():
    model = family("rotary")
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedCombination, match=r"packing and LlamaModel with attention 'eager'"):
        decode(model.get_decoder(), packed_layout(rows([1]), rows([2]), 0))


def test_a_model_that_drops_the_bounds_is_refused():
    query = torch.zeros(1, 1, 4, 2)
    with pytest.raises(UnsupportedCombination, match="does not hand"):
        packed_attention(torch.nn.Identity(), query, query, query, torch.ones(1, 1, 1, 1, dtype=torch.bool))


def test_attention_with_a_cap_on_its_scores_is_refused():
    query = torch.zeros(1, 1, 4, 2)
    edges = torch.tensor([0, 4])
    with pytest.raises(UnsupportedCombination, match="softcap"):
        packed_attention(torch.nn.Identity(), query, query, query, None, cu_seq_lens_q=edges, softcap=30.0)
