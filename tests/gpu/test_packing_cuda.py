"""Packed responses against the same responses one by one and padded: scores and gradients, mixes of lengths.

On a CUDA device bfloat16 goes through torch's variable-length kernel, fp32 through single rows; the parameters without
a device rehearse all but the kernel.
"""

from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from rft_trainer.models import Actor, packed_layout, packing, padded_layout

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]
REHEARSED = "many short"
PROMPT = 2
# tokens of prompt and response
MIXES = {
    "ragged": (70, 3, 130, 33),
    "equal": (64, 64, 64),
    "one": (257,),
    "many short": (3,) * 24,
    "one long": (900, 3, 4, 9),
    "around the blocks of a kernel": (127, 128, 129, 3, 64, 65),
}
CASES = [
    *(pytest.param("cpu", mix, marks=[] if mix == REHEARSED else pytest.mark.slow) for mix in MIXES),
    *(pytest.param("cuda", mix, marks=CUDA) for mix in MIXES),
]
LAYERS = 2
SHAPE = {
    "vocab_size": 301,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "attn_implementation": "sdpa",
}


def actor_of(family, device, dtype):
    torch.manual_seed(0)
    if family == "window":
        model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=48))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    return Actor(model.to(device=device, dtype=dtype).train())


def texts_of(mix):
    generator = torch.Generator().manual_seed(len(mix))
    return [torch.randint(0, 301, (length,), generator=generator) for length in MIXES[mix]]


def scored(family, device, dtype, layouts):
    """(log-probs and entropies of all response tokens row by row, gradients) of one model over `layouts`."""
    actor = actor_of(family, device, dtype)
    weights, found, start = torch.linspace(-1.0, 1.0, 2048), [], 0
    for layout in layouts:
        scores = actor(layout.to(torch.device(device)))
        flat = torch.stack([column[layout.mask] for column in (scores.log_probs.cpu(), scores.entropy.cpu())])
        found.append(flat.detach())
        part = weights[start : start + flat.shape[1]]
        start += flat.shape[1]
        (part * flat[0] + 0.1 * part * flat[1]).sum().backward()
    return torch.cat(found, dim=1), {name: p.grad.float().cpu() for name, p in actor.named_parameters()}


def split(texts):
    return [text[:PROMPT] for text in texts], [text[PROMPT:] for text in texts]


def packed(family, device, dtype, mix):
    return scored(family, device, dtype, [packed_layout(*split(texts_of(mix)), 0)])


def padded(family, device, dtype, mix):
    return scored(family, device, dtype, [padded_layout(*split(texts_of(mix)), 0)])


@cache
def one_by_one(family, device, dtype, mix):
    return scored(family, device, dtype, [padded_layout(*split([text]), 0) for text in texts_of(mix)])


def apart(got, expected):
    """Relative distance of two gradients as whole vectors."""
    square = sum((got[name] - tensor).square().sum() for name, tensor in expected.items())
    return float((square / sum(tensor.square().sum() for tensor in expected.values())).sqrt())


@pytest.mark.parametrize(("device", "mix"), CASES)
@pytest.mark.parametrize("family", ["full", "window"])
def test_packed_is_one_by_one_in_fp32(device, mix, family):
    scores, gradients = one_by_one(family, device, torch.float32, mix)
    for other in (packed, padded):
        got, found = other(family, device, torch.float32, mix)
        torch.testing.assert_close(got, scores, atol=2e-5, rtol=0)
        assert apart(found, gradients) <= 1e-5, other.__name__


@pytest.mark.parametrize(("device", "mix"), CASES)
@pytest.mark.parametrize("family", ["full", "window"])
def test_packed_is_as_near_to_fp32_in_bfloat16_as_one_by_one_is(device, mix, family, monkeypatch):
    kernel, calls = packing._varlen, []
    monkeypatch.setattr(packing, "_varlen", lambda *args: calls.append(1) or kernel(*args))
    exact, exact_gradients = one_by_one(family, device, torch.float32, mix)
    plain, plain_gradients = one_by_one(family, device, torch.bfloat16, mix)
    assert calls == []
    got, gradients = packed(family, device, torch.bfloat16, mix)
    assert len(calls) == (LAYERS if device == "cuda" else 0)
    assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-3
    assert (got - plain).abs().max() <= 5e-2
    assert apart(gradients, exact_gradients) <= 1.5 * apart(plain_gradients, exact_gradients) + 1e-3
    assert apart(plain_gradients, exact_gradients) <= 5e-2


@pytest.mark.parametrize("device", DEVICES)
def test_a_response_does_not_see_its_neighbours(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    texts = texts_of("ragged")
    actor = actor_of("full", device, dtype)
    changed = [*texts[:2], (texts[2] + 1) % 301, texts[3]]
    before, after = (
        actor(packed_layout(*split(rows), 0).to(torch.device(device))).log_probs.detach() for rows in (texts, changed)
    )
    for row in (0, 1, 3):
        assert before[row].equal(after[row])
    assert not before[2].equal(after[2])
