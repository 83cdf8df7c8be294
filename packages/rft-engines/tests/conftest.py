"""Tiny models and a letter tokenizer for the tests of this package."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 97
END = 2


class LetterTokenizer:
    """Id i is the character chr(32 + i); 2 ends."""

    eos_token_id = END

    def decode(self, ids, **options):
        return "".join(chr(32 + token) for token in ids)


def tiny_llama(seed=0, **changes):
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": END,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(values | changes))).eval()


@pytest.fixture
def model():
    return tiny_llama()


@pytest.fixture
def build_model():
    return tiny_llama


@pytest.fixture
def tokenizer():
    return LetterTokenizer()


@pytest.fixture
def prompts():
    """Ten prompts of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = (3, 7, 1, 40, 12, 12, 5, 22, 9, 2)
    return [tuple(torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()) for length in lengths]
