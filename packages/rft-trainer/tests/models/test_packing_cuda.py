"""Packed rows on a CUDA device: torch's variable-length kernel against the same rows one by one."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from rft_trainer.models.packing import packed_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (70, 1, 130, 33)


def attend(dtype, window):
    """(output, gradients) of grouped heads; fp32 goes row by row."""
    generator = torch.Generator("cuda").manual_seed(0)
    total, edges = sum(LENGTHS), torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    shapes = {"query": (1, 4, total, 64), "key": (1, 2, total, 64), "value": (1, 2, total, 64)}
    inputs = {
        name: torch.randn(shape, generator=generator, device="cuda").bfloat16().to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }
    output, _ = packed_attention(
        nn.Identity(), **inputs, attention_mask=None, cu_seq_lens_q=edges, max_length_q=130, sliding_window=window
    )
    assert output.shape == (1, total, 4, 64)
    weights = torch.randn(output.shape, generator=generator, device="cuda")
    (output.float() * weights).sum().backward()
    return [output, *(tensor.grad for tensor in inputs.values())]


@pytest.mark.parametrize("window", [None, 16])
def test_the_kernel_gives_the_numbers_of_single_rows(window):
    for got, expected in zip(attend(torch.bfloat16, window), attend(torch.float32, window), strict=True):
        assert_close(got.float(), expected, atol=4e-2, rtol=4e-2)
