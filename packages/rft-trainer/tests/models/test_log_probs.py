import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rft_trainer.errors import ConfigurationError, UnsupportedCombination
from rft_trainer.models.log_probs import Truncation, chunked_log_probs, gather_log_probs

VOCABULARY, WIDTH = 53, 16


def _problem(tokens=37, dtype=torch.float32, shape=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(dtype)
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.5).to(dtype)
    bias = torch.randn(VOCABULARY, generator=generator).to(dtype)
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    if shape is not None:
        hidden, labels = hidden.reshape(*shape, WIDTH), labels.reshape(shape)
    return hidden, weight, bias, labels


def _naive(hidden, weight, bias, labels, temperature=1.0):
    logits = hidden.float() @ weight.float().t()
    if bias is not None:
        logits = logits + bias.float()
    log_p = (logits / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, labels[..., None]).squeeze(-1), entropy


def _gradients(function, tensors, coefficients):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors if tensor is not None]
    log_probs, entropy = function(*leaves)
    ((log_probs * coefficients[0]).sum() + (entropy * coefficients[1]).sum()).backward()
    return (log_probs.detach(), entropy.detach(), *(leaf.grad for leaf in leaves))


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("has_bias", [True, False])
def test_equal_to_the_naive_computation(chunk_tokens, temperature, has_bias):
    hidden, weight, bias, labels = _problem()
    tensors = (hidden, weight, bias) if has_bias else (hidden, weight)
    coefficients = torch.randn(2, 37, generator=torch.Generator().manual_seed(9))

    def chunked(hidden, weight, bias=None):
        return chunked_log_probs(
            hidden,
            weight,
            labels,
            bias=bias,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            with_entropy=True,
        )

    def naive(hidden, weight, bias=None):
        return _naive(hidden, weight, bias, labels, temperature)

    for ours, expected in zip(
        _gradients(chunked, tensors, coefficients), _gradients(naive, tensors, coefficients), strict=True
    ):
        assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_without_entropy_gives_the_same_log_probs_and_gradient():
    hidden, weight, bias, labels = _problem(shape=(1, 37))
    results = []
    for with_entropy in (True, False):
        leaf = hidden.clone().requires_grad_()
        outputs = chunked_log_probs(leaf, weight, labels, bias=bias, chunk_tokens=5, with_entropy=with_entropy)
        log_probs = outputs[0] if with_entropy else outputs
        log_probs.sum().backward()
        results.append((log_probs.detach(), leaf.grad))
    assert_close(results[0], results[1])


def test_shape_of_labels_is_kept_without_a_view():
    hidden, weight, _, labels = _problem(36, shape=(4, 9))
    hidden.requires_grad_()
    outputs = chunked_log_probs(hidden, weight, labels, with_entropy=True)
    assert [output.shape for output in outputs] == [(4, 9), (4, 9)]
    # a sharded module that returns a view loses its backward hook to a later in-place operation
    assert not any(output._is_view() for output in outputs)
    assert chunked_log_probs(hidden[:, :0], weight, labels[:, :0]).shape == (4, 0)


def test_no_token_still_gives_gradients_of_zero():
    _, weight, _, _ = _problem()
    weight.requires_grad_()
    chunked_log_probs(torch.zeros(0, WIDTH), weight, torch.zeros(0, dtype=torch.long)).sum().backward()
    assert weight.grad.eq(0).all()


def test_only_the_asked_gradients_are_made():
    hidden, weight, bias, labels = _problem()
    bias.requires_grad_()
    chunked_log_probs(hidden, weight, labels, bias=bias).sum().backward()
    assert bias.grad is not None
    assert hidden.grad is None
    assert weight.grad is None


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 9}])
def test_a_frozen_head_gives_the_gradient_of_a_trained_one(options):
    hidden, weight, bias, labels = _problem()
    gradients = []
    for is_frozen in (True, False):
        leaf = hidden.clone().requires_grad_()
        head = weight.clone().requires_grad_(not is_frozen)
        log_probs = chunked_log_probs(leaf, head, labels, bias=bias, chunk_tokens=7, **options)
        (log_probs * torch.arange(37)).sum().backward()
        gradients.append(leaf.grad)
    assert_close(*gradients, atol=2e-5, rtol=1e-5)


def test_bf16_inputs_are_summed_in_fp32():
    hidden, weight, bias, labels = _problem(dtype=torch.bfloat16)
    coefficients = torch.randn(2, 37, generator=torch.Generator().manual_seed(9))
    chunked = _gradients(
        lambda h, w, b: chunked_log_probs(h, w, labels, bias=b, chunk_tokens=10, with_entropy=True),
        (hidden, weight, bias),
        coefficients,
    )
    exact = _gradients(
        lambda h, w, b: _naive(h, w, b, labels), (hidden.float(), weight.float(), bias.float()), coefficients
    )
    assert_close(chunked[:2], exact[:2], atol=1e-5, rtol=1e-5)
    for ours, expected in zip(chunked[2:], exact[2:], strict=True):
        assert ours.dtype == torch.bfloat16
        assert_close(ours, expected.bfloat16(), atol=1e-3, rtol=8e-3)


def test_a_low_precision_head_is_read_in_tiles(monkeypatch):
    monkeypatch.setattr("rft_trainer.models.log_probs._TILE_ELEMENTS", 5 * WIDTH)
    hidden, weight, _, labels = _problem(dtype=torch.bfloat16)
    leaf = hidden.clone().requires_grad_()
    log_probs = chunked_log_probs(leaf, weight, labels, chunk_tokens=10)
    log_probs.sum().backward()
    exact = hidden.float().requires_grad_()
    expected, _ = _naive(exact, weight.float(), None, labels)
    expected.sum().backward()
    assert_close(log_probs.detach(), expected.detach(), atol=1e-5, rtol=1e-5)
    assert_close(leaf.grad, exact.grad.bfloat16(), atol=1e-3, rtol=8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_shapes_that_disagree_raise_in_every_dtype(dtype):
    labels = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"labels \(1, 4\) must match logits \(1, 6, 9\)"):
        gather_log_probs(torch.zeros(1, 6, 9, dtype=dtype), labels)
    with pytest.raises(ValueError, match=r"labels \(1, 4\) must match hidden \(1, 6, 9\)"):
        chunked_log_probs(torch.zeros(1, 6, 9, dtype=dtype), torch.zeros(5, 9, dtype=dtype), labels)
    with pytest.raises(ValueError, match="integers"):
        gather_log_probs(torch.zeros(1, 4, 9, dtype=dtype), labels.to(dtype))


def test_a_sharded_head_is_refused_with_the_remedy():
    weight = torch.zeros(5, 9)
    weight.full_tensor = lambda: weight
    with pytest.raises(UnsupportedCombination, match="full_tensor"):
        chunked_log_probs(torch.zeros(4, 9), weight, torch.zeros(4, dtype=torch.long))


def test_a_head_of_another_width_raises():
    labels = torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"weight \(5, 8\) must be \[V, 9\]"):
        chunked_log_probs(torch.zeros(4, 9), torch.zeros(5, 8), labels)
    with pytest.raises(ValueError, match=r"got \(4,\)"):
        chunked_log_probs(torch.zeros(4, 9), torch.zeros(5, 9), labels, bias=torch.zeros(4))


def test_small_probabilities_are_exact():
    logits = torch.tensor([[0.0, 6.3]])
    expected = -6.3 - math.log1p(math.exp(-6.3))
    for dtype in (torch.float32, torch.float64):
        assert gather_log_probs(logits.to(dtype), torch.tensor([0])).item() == pytest.approx(expected, abs=1e-5)
    weight = torch.tensor([[0.0], [6.3]])
    assert chunked_log_probs(torch.ones(1, 1), weight, torch.tensor([0])).item() == pytest.approx(expected, abs=1e-5)


def test_temperature_is_that_of_the_sampling():
    logits, label = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    assert gather_log_probs(logits, label, 0.6).item() == pytest.approx(-0.202573, abs=1e-6)
    assert gather_log_probs(logits, label).item() == pytest.approx(-0.407606, abs=1e-6)
    weight = logits.reshape(3, 1)
    assert chunked_log_probs(torch.ones(1, 1), weight, label, temperature=0.6).item() == pytest.approx(
        -0.202573, abs=1e-6
    )


PROBABILITIES = torch.tensor([[0.5, 0.25, 0.15, 0.1]])


@pytest.mark.parametrize(
    ("options", "label", "expected"),
    [
        ({"top_k": 2}, 0, 0.5 / 0.75),
        ({"top_k": 9}, 0, 0.5),
        ({"top_p": 0.6}, 1, 0.25 / 0.75),
        ({"top_p": 0.5}, 0, 1.0),
        ({"top_p": 0.76}, 2, 0.15 / 0.9),
        ({"top_p": 1.0}, 3, 0.1),
        # top p is taken of what top k left: 0.5 / 0.9 = 0.56 and 0.25 / 0.9 = 0.28 reach 0.8
        ({"top_k": 3, "top_p": 0.8}, 1, 0.25 / 0.75),
        # a label outside the cut is kept in it, so that its log-prob is finite
        ({"top_k": 1}, 3, 0.1 / 0.6),
    ],
)
def test_truncation_renormalises(options, label, expected):
    logits, labels = PROBABILITIES.log(), torch.tensor([label])
    assert gather_log_probs(logits, labels, **options).exp().item() == pytest.approx(expected, abs=1e-6)
    chunked, entropy = chunked_log_probs(torch.ones(1, 1), logits.t(), labels, with_entropy=True, **options)
    assert chunked.exp().item() == pytest.approx(expected, abs=1e-6)
    assert entropy.isfinite().all()


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.9, "temperature": 0.8}])
def test_truncated_gradient_equals_autograd_through_full_logits(options):
    hidden, weight, _, labels = _problem()
    results = []
    for is_chunked in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        if is_chunked:
            log_probs = chunked_log_probs(leaves[0], leaves[1], labels, chunk_tokens=7, **options)
        else:
            log_probs = gather_log_probs(leaves[0] @ leaves[1].t(), labels, **options)
        (log_probs * torch.arange(37)).sum().backward()
        results.append((log_probs.detach(), *(leaf.grad for leaf in leaves)))
    for ours, expected in zip(*results, strict=True):
        assert_close(ours, expected, atol=2e-5, rtol=1e-5)


def test_truncated_entropy_and_its_gradient():
    hidden, weight, _, labels = _problem()
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, hidden)]
    _, entropy = chunked_log_probs(leaves[0], weight, labels, top_k=6, chunk_tokens=7, with_entropy=True)
    logits = leaves[1] @ weight.t()
    kept = (logits >= logits.topk(6).values[:, -1:]).scatter(1, labels[:, None], True)
    log_p = logits.masked_fill(~kept, -1e9).log_softmax(-1)
    expected = -(log_p.exp() * log_p).sum(-1)
    entropy.sum().backward()
    expected.sum().backward()
    assert_close(entropy.detach(), expected.detach(), atol=1e-5, rtol=1e-5)
    assert_close(leaves[0].grad, leaves[1].grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_sampling_numbers_out_of_range_name_themselves(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Truncation(**options)
    with pytest.raises(ConfigurationError, match=message):
        gather_log_probs(torch.zeros(1, 3), torch.tensor([0]), **options)
    with pytest.raises(ConfigurationError, match="chunk_tokens"):
        chunked_log_probs(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), chunk_tokens=0)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10_000))
def test_any_chunk_gives_the_same_numbers(tokens, chunk_tokens, seed):
    hidden, weight, bias, labels = _problem(tokens, seed=seed)
    expected, entropy = _naive(hidden, weight, bias, labels)
    ours = chunked_log_probs(hidden, weight, labels, bias=bias, chunk_tokens=chunk_tokens, with_entropy=True)
    assert_close(ours, (expected, entropy), atol=1e-5, rtol=1e-5)
    assert ours[0].max() <= 0
    assert ours[1].min() >= -1e-6


class _LiveBytes(TorchDispatchMode):
    """Peak bytes of all storages that operators have made and that still live."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage(), given)
        return result

    def _count(self, storage, given):
        key = storage._cdata
        if key in given or key in self.seen:
            return
        self.seen.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, storage.nbytes())

    def _drop(self, key, size):
        self.seen.discard(key)
        self.live -= size


def _peak_bytes(path, chunk_tokens, tokens, vocabulary, width):
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=path != "frozen_head")
    labels = torch.zeros(tokens, dtype=torch.long)
    options = {
        "score": {},
        "update": {},
        "frozen_head": {},
        "entropy": {"with_entropy": True},
        "top_p": {"top_p": 0.9},
    }[path]
    gc.collect()
    with _LiveBytes() as meter, torch.set_grad_enabled(path != "score"):
        outputs = chunked_log_probs(hidden, weight, labels, chunk_tokens=chunk_tokens, **options)
        if path != "score":
            loss = outputs[0].sum() + outputs[1].sum() if path == "entropy" else outputs.sum()
            loss.backward()
    return meter.peak


@pytest.mark.parametrize("path", ["score", "update", "frozen_head", "entropy", "top_p"])
def test_working_memory_is_a_few_chunks_on_every_path(path, monkeypatch):
    # 8192 tokens, 151,936 tokens of vocabulary and chunks of 512 scaled down: 1 GiB is 3.4 chunks, a tile 0.2 chunks
    tokens, vocabulary, width, chunk = 256, 1024, 8, 16
    monkeypatch.setattr("rft_trainer.models.log_probs._TILE_ELEMENTS", 3 * vocabulary)
    own = 4 * (tokens * width + vocabulary * width + 4 * tokens)  # gradients of the inputs and numbers per token
    one_chunk = 4 * chunk * vocabulary
    limit = own + 3.4 * one_chunk
    assert _peak_bytes(path, chunk, tokens, vocabulary, width) <= limit
    # the same measure finds the full matrix when the chunk covers everything
    assert _peak_bytes(path, tokens, tokens, vocabulary, width) > limit
