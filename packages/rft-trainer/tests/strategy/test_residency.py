"""Memory leaves and comes back byte for byte, under every view of it; the code is the one that a GPU runs."""

import pytest
import torch
from torch import nn

from rft_trainer.errors import ResidencyError
from rft_trainer.strategy.residency import HostMirror, MovableMemory, module_tensors, optimizer_tensors, storage_bytes

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.odd = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.low = nn.Parameter(torch.randn(11).bfloat16())
        self.register_buffer("table", torch.arange(6))

    def forward(self, ids):
        return self.head(self.embed(ids)) + self.odd.sum() + self.low.float().sum()


def memory(tensors, chunk_bytes=64):
    return MovableMemory("it", tensors, CPU, copies=True, mirror=HostMirror(pinned=False, chunk_bytes=chunk_bytes))


@pytest.mark.parametrize("chunk_bytes", [1, 64, 100, 1 << 20])
def test_a_round_trip_is_byte_exact_whatever_the_chunks(chunk_bytes):
    model = Tied()
    model(torch.tensor([1, 2])).sum().backward()
    everything = list(module_tensors(model))
    before = [tensor.clone() for tensor in everything]
    total = storage_bytes(everything, CPU)
    assert total == 2 * (7 * 5 * 4 + 3 * 8 + 11 * 2) + 6 * 8  # tied once, gradients, the buffer
    moved = memory(lambda: module_tensors(model), chunk_bytes)
    for _ in range(2):
        moved.offload()
        assert moved.on_host
        assert moved.nbytes() == 0
        moved.offload()  # twice is once
        # What was there may be anything now.
        moved.reload()
        moved.reload()
        assert moved.nbytes() == total
    for tensor, value in zip(everything, before, strict=True):
        assert torch.equal(tensor, value)
    assert model.head.weight is model.embed.weight
    moves = moved.take_moves()
    assert [move.direction for move in moves] == ["offload", "reload"] * 2
    assert {move.nbytes for move in moves} == {total}
    assert all(move.gigabytes_per_second > 0 for move in moves)
    assert moved.take_moves() == []


def test_the_mirror_is_allocated_once():
    mirror = HostMirror(pinned=False, chunk_bytes=64)
    weight = nn.Parameter(torch.randn(100))
    moved = MovableMemory("it", lambda: [weight.data], CPU, copies=True, mirror=mirror)
    moved.offload()
    moved.reload()
    chunks = [chunk.data_ptr() for chunk in mirror._chunks]
    moved.offload()
    assert [chunk.data_ptr() for chunk in mirror._chunks] == chunks
    assert mirror.nbytes == 400


def test_an_optimiser_steps_the_same_after_a_stay_on_the_host():
    def run(stay):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        moved = memory(lambda: optimizer_tensors(optimizer))
        for _ in range(3):
            if stay:
                moved.reload()
            model(torch.ones(4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if stay:
                moved.offload()
        return model.weight

    assert torch.equal(run(stay=True), run(stay=False))


def test_a_reload_that_fails_continues_where_it_stopped(monkeypatch):
    first, second = torch.randn(10), torch.randn(20)
    values = first.clone(), second.clone()
    moved = memory(lambda: [first, second])
    moved.offload()
    resize = torch.UntypedStorage.resize_
    monkeypatch.setattr(
        torch.UntypedStorage,
        "resize_",
        lambda self, size: resize(self, size) if size < 80 else (_ for _ in ()).throw(torch.OutOfMemoryError("full")),
    )
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        moved.reload()
    assert moved.on_host
    with pytest.raises(ResidencyError, match="a forward pass refused: it is on the host"):
        moved.require("a forward pass")
    monkeypatch.undo()
    moved.reload()
    moved.require("a forward pass")
    assert torch.equal(first, values[0])
    assert torch.equal(second, values[1])


def test_on_a_cpu_only_the_state_changes():
    weight = torch.randn(10)
    moved = MovableMemory("it", lambda: [weight], CPU)
    moved.offload()
    assert moved.on_host
    assert moved.nbytes() == 40
    assert moved.take_moves() == []
    with pytest.raises(ResidencyError):
        moved.require("anything")
    moved.reload()
    moved.require("anything")
