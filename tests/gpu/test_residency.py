"""Movement on a real device: bytes come back, memory is really free in between, and the mirrors are used again."""

import pytest
import torch
from torch import nn

from rft_trainer.config import OptimizerConfig
from rft_trainer.errors import ResidencyError
from rft_trainer.optim import AdamWConfig
from rft_trainer.strategy.fsdp import FSDPBackend
from rft_trainer.strategy.residency import MovableMemory, module_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")


def test_a_round_trip_is_byte_exact_and_frees_the_device():
    model = nn.Sequential(*(nn.Linear(4096, 4096, device=DEVICE) for _ in range(8)))
    values = [tensor.cpu() for tensor in module_tensors(model)]
    memory = MovableMemory("it", lambda: module_tensors(model), DEVICE)
    held = memory.nbytes()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        memory.offload()
        torch.cuda.synchronize()
        assert before - torch.cuda.memory_allocated() >= held
        # What the allocator hands out now lies where the weights were.
        filler = torch.full((held,), 255, dtype=torch.uint8, device=DEVICE)
        del filler
        memory.reload()
    for tensor, value in zip(module_tensors(model), values, strict=True):
        assert torch.equal(tensor.cpu(), value)
    moves = memory.take_moves()
    assert len(moves) == 6
    assert {move.nbytes for move in moves} == {held}
    # The first copy pays for the pages; pinned memory then moves faster than pageable memory can.
    print([f"{move.direction} {move.gigabytes_per_second:.1f} GB/s" for move in moves])


def train(steps, *, moves, dtype_bf16=True):
    """Norms and weights of an FSDP2 model on one device, its memory away between the steps or not."""
    torch.manual_seed(0)
    backend = FSDPBackend(DEVICE, bf16=dtype_bf16)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    state = backend.prepare(model, OptimizerConfig(adamw=AdamWConfig(lr=1e-2), max_norm=1.0))
    inputs = torch.randn(32, 256, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    norms = []
    for _ in range(steps):
        backend.backward(state, state.module(inputs).square().mean(), last=True)
        norms.append(backend.optimizer_step(state).grad_norm)
        if moves:
            backend.offload_optimizer(state)
            backend.offload_model(state)
            with pytest.raises(ResidencyError, match="actor is on the host"):
                state.module(inputs)
            torch.cuda.empty_cache()
            backend.reload_model(state)
    return norms, [p.detach().to_local().cpu() for p in model.parameters()]


def test_fsdp2_trains_the_same_with_its_memory_away_between_steps():
    from rft_dist import distributed_session

    with distributed_session():
        norms, weights = train(4, moves=False)
        moved_norms, moved = train(4, moves=True)
    assert moved_norms == norms
    for one, other in zip(moved, weights, strict=True):
        assert torch.equal(one, other)
