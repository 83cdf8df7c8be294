"""Forecast bytes against the bytes of live tensor storages, on every backend."""

from dataclasses import replace

import pytest
import torch

from rft_dist.testing import run_ranks
from rft_trainer.config import RFTConfig
from rft_trainer.memory.forecast import Cluster, frozen_bytes, trained_bytes
from rft_trainer.memory.shapes import model_shapes, read_config
from rft_trainer.models import Actor, load_causal_model, padded_layout
from rft_trainer.roles import build_policy
from rft_trainer.strategy import get_strategy
from rft_trainer.strategy.residency import storage_bytes
from rft_trainer.testing import tiny_model_folder

CASES = {
    "fsdp2": {"fsdp": True},
    "fsdp2-lora": {"fsdp": True, "lora_rank": 4},
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero2-lora": {"zero_stage": 2, "lora_rank": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny", hidden=128, layers=3))


def measure(rank, world, cases):
    """case -> (weights, gradients, optimiser, frozen) on this rank, one process group per strategy."""
    found = {}
    for name, config in cases.items():
        with get_strategy(config).setup_distributed() as strategy:
            device = strategy.device
            state = strategy.prepare(build_policy(config, config.pretrain, bf16=False))
            frozen = strategy.prepare_frozen(Actor(load_causal_model(config.pretrain)))
            layout = padded_layout([torch.arange(1, 5)], [torch.arange(5, 12)], 0)
            weights = state.memory.model.nbytes()
            strategy.backward(state, -state.module(layout).log_probs.sum())
            state.release_gathered()
            if config.fsdp:
                gradients = state.memory.model.nbytes() - weights
            else:
                gradients = storage_bytes(strategy.backend._local_gradients(state), device)
            strategy.optimizer_step(state)
            optimizer = state.memory.optimizer.nbytes()
            found[name] = (weights, gradients, optimizer, strategy.backend.memory_of(frozen).nbytes())
    return found


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ("fsdp2", "zero2", "zero3")),
        *(pytest.param(world, tuple(CASES), marks=pytest.mark.slow) for world in (1, 2, 4)),
    ],
)
def test_each_owner_is_within_a_tenth(folder, world, names):
    cases = {name: replace(RFTConfig(pretrain=folder), **CASES[name]) for name in names}
    cluster = Cluster(ranks=world, device_bytes=None, bf16=False)
    base = model_shapes(read_config(folder))
    for found in run_ranks(measure, world, cases, timeout_seconds=550):
        for name, config in cases.items():
            shapes = model_shapes(read_config(folder), adapters=config.adapters(config.seed))
            state = trained_bytes(shapes, config, cluster)
            expected = (state.weights, state.gradients, state.optimizer, frozen_bytes(base, config, cluster))
            assert found[name] == pytest.approx(expected, rel=0.1), name
