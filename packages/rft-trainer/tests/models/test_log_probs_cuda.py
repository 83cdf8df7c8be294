"""The chunked log-probs on a CUDA device, where bf16 factors are multiplied into fp32 without a copy of the head."""

import pytest
import torch
from torch.testing import assert_close

from rft_trainer.models.log_probs import chunked_log_probs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_full_logits(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator, device="cuda").to(dtype)
    weight = (torch.randn(1000, 64, generator=generator, device="cuda") * 0.3).to(dtype)
    labels = torch.randint(0, 1000, (300,), generator=generator, device="cuda")
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    expected = (exact[0] @ exact[1].t()).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    expected.sum().backward()
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    log_probs, _ = chunked_log_probs(*leaves, labels, chunk_tokens=70, with_entropy=True)
    log_probs.sum().backward()
    assert_close(log_probs.double(), expected, atol=1e-5, rtol=1e-5)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for leaf, reference in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == dtype
        assert_close(leaf.grad.double(), reference.grad, atol=tolerance, rtol=tolerance)


def test_peak_memory_of_32k_tokens_and_150k_vocabulary():
    # full fp32 logits would be 18.3 GiB; the bound is 3 GiB beside inputs and gradients
    hidden = torch.randn(32_768, 896, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151_936, 896, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    labels = torch.randint(0, 151_936, (32_768,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_probs, entropy = chunked_log_probs(hidden, weight, labels, with_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    # bf16 gradients of both inputs and the head's gradient summed in fp32
    own = 2 * hidden.numel() + 6 * weight.numel()
    assert torch.cuda.max_memory_allocated() - before - own < 3 * 2**30
