"""Every way to shard gives the numbers of plain torch: copies of shards, shards on the host, blocks kept gathered."""

import pytest
import torch

from integration.test_backends import NAMES, ROWS, full_weights, loss_of, optimizer, plain, rows
from rft_dist.testing import run_ranks
from rft_trainer.models import Actor, load_causal_model
from rft_trainer.strategy import DeepspeedBackend, FSDPBackend
from rft_trainer.strategy.fsdp import transformer_blocks
from rft_trainer.testing import tiny_model_folder

WAYS = {
    "hsdp": (FSDPBackend, {"shard_size": 1}),
    "hsdp of 2": (FSDPBackend, {"shard_size": 2}),
    "on the host": (FSDPBackend, {"cpu_offload": True}),
    "kept for backward": (FSDPBackend, {"reshard": False}),
    "zero3 hpz": (DeepspeedBackend, {"stage": 3, "hpz_size": 2}),
    "zero2 overlap": (DeepspeedBackend, {"stage": 2, "overlap": True}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def train(rank, world, folder, ways):
    """way -> (norms, weights) after two steps, each in one process group; and whether anything moved by hand."""
    found = {}
    for way in ways:
        kind, options = WAYS[way]
        machinery = kind(torch.device("cpu"), **options)
        state = machinery.prepare(Actor(load_causal_model(folder)), optimizer(0.05))
        ids, weights = rows()
        mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
        norms = []
        for _ in range(2):
            machinery.backward(state, loss_of(state.module, ids[mine], weights[mine]), last=True)
            norms.append(machinery.optimizer_step(state).grad_norm)
        machinery.offload_model(state)
        moved = state.memory.model.on_host
        machinery.reload_model(state)
        found[way] = norms, full_weights(state), moved
    return found


@pytest.mark.parametrize(
    ("world", "ways"),
    [
        (2, ("hsdp", "on the host", "kept for backward", "zero3 hpz")),
        pytest.param(1, ("hsdp", "on the host", "kept for backward"), marks=pytest.mark.slow),
        pytest.param(4, tuple(WAYS), marks=pytest.mark.slow),
    ],
)
def test_the_numbers_are_those_of_plain_torch(folder, world, ways):
    norms, weights = plain(folder, optimizer(0.05), steps=2)
    for found in run_ranks(train, world, folder, ways, timeout_seconds=550):
        for way, (got_norms, got, moved) in found.items():
            assert got_norms == pytest.approx(norms, rel=1e-5), way
            for name in NAMES:
                assert torch.allclose(got[name], weights[name], atol=2e-5), (way, name)
            # What a policy of its own places is never moved by hand.
            assert moved is (way != "on the host"), way


def test_the_wrap_list_is_the_models_own_and_ties_stay(folder):
    model = load_causal_model(folder)
    blocks = transformer_blocks(Actor(model))
    assert [type(block).__name__ for block in blocks] == ["LlamaDecoderLayer"] * 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
