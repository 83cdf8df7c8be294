"""Fingerprints and NaN counts of many tensors at once; the kernel in Triton's interpreter, where Triton is there."""

import importlib.util
import os
import subprocess
import sys
import weakref

import pytest
import torch

from rft_sync import fingerprint
from rft_sync.fingerprint import CHUNK_WORDS, MASK, MULTIPLIERS
from rft_sync.parameters import ParamMeta
from rft_sync.scan import LivePieces, Piece, Scanner


def _by_hand(words):
    """The definition, word by word in Python's own integers."""
    total = 0
    for place, word in enumerate(words):
        mixed = place % CHUNK_WORDS
        for multiplier in MULTIPLIERS:
            mixed = mixed * multiplier & MASK
            mixed ^= mixed >> 15
        total += word * (2 * mixed + 1) * pow(6364136223846793005, place // CHUNK_WORDS, 1 << 64)
    total %= 1 << 64
    return total - (1 << 64) if total >= 1 << 63 else total


def test_the_definition_by_hand():
    words = torch.randint(-(2**31), 2**31 - 1, (300,), dtype=torch.int32)
    assert fingerprint(words) == _by_hand(words.tolist())
    long = torch.zeros(CHUNK_WORDS + 3, dtype=torch.int32)
    long[[0, 5, CHUNK_WORDS, CHUNK_WORDS + 2]] = torch.tensor([7, -9, 11, 13], dtype=torch.int32)
    assert fingerprint(long) == _by_hand(long.tolist())
    assert fingerprint(torch.tensor([1, 2, 3], dtype=torch.uint8)) == _by_hand([1 + 2 * 256 + 3 * 65536])


def test_weights_of_a_chunk_are_odd_and_all_different():
    from rft_sync.fingerprint import _weights

    weights = _weights(torch.device("cpu"))
    assert bool((weights % 2 == 1).all())
    assert int(weights.max()) < 2**31
    assert weights.unique().numel() == CHUNK_WORDS


def test_rows_of_equal_sums_are_told_apart():
    identity = torch.eye(64)
    swapped = identity[[1, 0, *range(2, 64)]]
    assert fingerprint(identity) != fingerprint(swapped)


def test_pieces_are_cast_counted_and_kept_in_place():
    bad = torch.tensor([1.0, float("nan"), float("inf"), 2.0, -float("inf"), 3.0])
    pieces = [
        Piece(torch.randn(5, 3), torch.bfloat16),
        Piece(bad, torch.float32),
        Piece(torch.randn(4, 6).t(), torch.float32),
        Piece(torch.full((3,), 3e38), torch.float16),  # too large for the dtype in which it is sent
        Piece(torch.arange(3), torch.int64),
        Piece(torch.zeros(0), torch.float32),
    ]
    scanned = Scanner().scan(pieces, finite=True)
    assert scanned.nonfinite() == [1, 3]
    expected = {place: fingerprint(piece.tensor.to(piece.dtype)) for place, piece in enumerate(pieces)}
    assert scanned.fingerprints() == expected
    assert Scanner().scan(pieces, finite=True, fingerprints=False).known() == set()
    assert Scanner().scan([]).fingerprints() == {}


def test_tied_tensors_are_read_once_and_answer_twice(monkeypatch):
    from rft_sync import scan as module

    read = []
    take, take_together = module.fingerprint_tensor, module.fingerprint_together
    monkeypatch.setattr(module, "fingerprint_tensor", lambda tensor: read.append(tensor) or take(tensor))
    monkeypatch.setattr(
        module, "fingerprint_together", lambda tensors, dtype: read.extend(tensors) or take_together(tensors, dtype)
    )
    tied = torch.tensor([1.0, float("inf")])
    empty = torch.zeros(0)
    pieces = [Piece(tensor, torch.float32) for tensor in (tied, torch.ones(2), tied, tied[:1], empty, empty)]
    scanned = Scanner().scan([*pieces, Piece(tied, torch.bfloat16)], finite=True)
    values = scanned.fingerprints()
    assert scanned.nonfinite() == [0, 2, 6]
    assert scanned.known() == set(values) == set(range(7))
    assert values[0] == values[2] != values[6]
    assert len(read) == 6


EDGES = [
    1e39,
    3.39e38,
    3.38e38,
    65505.0,
    65520.0,
    65503.0,
    449.0,
    465.0,
    1.0,
    float("nan"),
    float("inf"),
    -float("inf"),
]


@pytest.mark.parametrize("size", [3, 1 << 15], ids=["small", "large"])
@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sent", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_what_becomes_infinite_on_its_way_is_told_from_the_extremes_alone(source, sent, size):
    tensors = []
    for value in [*EDGES, *(-edge for edge in EDGES)]:
        tensor = torch.full((size,), 0.5, dtype=torch.float64)
        tensor[size // 2] = value
        tensors.append(tensor.to(source))
    wanted = [place for place, t in enumerate(tensors) if not bool(torch.isfinite(t.to(sent).float().double()).all())]
    if sent is torch.float64:
        wanted = [place for place, t in enumerate(tensors) if not bool(torch.isfinite(t).all())]
    scanned = Scanner().scan([Piece(tensor, sent) for tensor in tensors], finite=True, fingerprints=False)
    assert scanned.nonfinite() == wanted


def test_complex_and_integer_values_are_looked_at_too():
    values = torch.tensor([1.0, float("nan")])
    pieces = [
        Piece(torch.complex(values, torch.zeros(2)), torch.complex64),
        Piece(torch.complex(torch.zeros(2), values), torch.complex64),
        Piece(torch.complex(torch.zeros(2), torch.ones(2)).conj(), torch.complex64),
        Piece(torch.tensor([70000, 1]), torch.float16),
        Piece(torch.tensor([7, 1]), torch.float16),
        Piece(torch.tensor([True, False]), torch.bool),
    ]
    scanned = Scanner().scan(pieces, finite=True)
    assert scanned.nonfinite() == [0, 1, 3]
    assert scanned.fingerprints() == {place: fingerprint(piece.cast()) for place, piece in enumerate(pieces)}


def test_many_small_tensors_are_fingerprinted_together_as_one_by_one():
    sizes = [1, 2, 3, 4, 5, 64, 127, 1000, (1 << 14), (1 << 14) + 1, (1 << 14) + 2] * 9
    for source, sent in [
        (torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
        (torch.int64, torch.int64), (torch.uint8, torch.uint8), (torch.float64, torch.float64),
    ]:  # fmt: skip
        pieces = [Piece((torch.randn(size) * 50).to(source), sent) for size in sizes]
        pieces.append(Piece(torch.arange(24).view(4, 6).to(source).t(), sent))
        found = Scanner().scan(pieces).fingerprints()
        assert found == {place: fingerprint(piece.cast()) for place, piece in enumerate(pieces)}


def test_a_token_spares_the_look_at_every_piece_and_holds_no_tensor():
    scanner, token = Scanner(), object()
    tensors = {"a": torch.randn(4), "b": torch.randn(6)}
    metadata = {name: ParamMeta(name=name, shape=(1,), dtype=torch.float32) for name in tensors}
    metadata["c"] = ParamMeta(name="c", shape=(1,), dtype=torch.float32, alias_of="a")
    pieces = LivePieces(metadata, tensors)
    assert len(pieces) == 3
    first = scanner.scan(pieces, token=token).fingerprints()
    assert first == {place: fingerprint(tensors[name]) for place, name in enumerate("aba")}
    tensors["b"][2] = 9.0  # the values are read anew
    assert scanner.scan(pieces, token=token).fingerprints() == first | {1: fingerprint(tensors["b"])}
    tensors["a"] = torch.randn(4)
    assert scanner.scan(pieces, token=object()).fingerprints()[2] == fingerprint(tensors["a"])
    held = weakref.ref(tensors.pop("b"))
    del pieces
    assert held() is None


KERNEL = """
import torch
from rft_sync import fingerprint, scan_kernel
from rft_sync.fingerprint import CHUNK_WORDS
from rft_sync.scan import Piece
torch.manual_seed(0)
tensors = [torch.randn(size).bfloat16().float() for size in [(CHUNK_WORDS + 6,), (70, 50), (2,)]]
tensors[1][3, 4] = float("inf")
tensors[0][-1] = float("nan")
for source, sent in [
    (torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
]:
    pieces = [Piece(tensor.to(source), sent) for tensor in tensors]
    if source != sent:  # the interpreter has another NaN and does not round: values that both formats hold
        pieces[0].tensor[-1] = 1.0
        if sent == torch.float16:
            pieces = [Piece(piece.tensor.half().float(), sent) for piece in pieces]
    sums, bad = scan_kernel.run(scan_kernel.build_table(pieces), finite=True)
    assert sums.tolist() == [fingerprint(piece.cast()) for piece in pieces], (source, sent)
    assert bad.tolist() == [int((~torch.isfinite(piece.cast())).sum()) for piece in pieces], (source, sent)
pieces = [Piece(torch.arange(-9, 9), torch.int64)]
sums, bad = scan_kernel.run(scan_kernel.build_table(pieces), finite=True)
assert sums.tolist() == [fingerprint(pieces[0].tensor)] and bad is None
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch build has no Triton")
def test_the_kernel_computes_the_definition():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
