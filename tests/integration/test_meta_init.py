"""FSDP2 from weights that wait in their files: the shards of the plain path, and never a whole model on a rank."""

import gc

import pytest
import torch

from integration.test_backends import loss_of, optimizer, rows
from rft_dist.testing import run_ranks
from rft_sync import source_for
from rft_trainer.models import Actor, Critic, load_causal_model
from rft_trainer.strategy import FSDPBackend, fsdp
from rft_trainer.strategy.residency import distinct_storages
from rft_trainer.testing import tiny_model_folder

CPU = torch.device("cpu")
LAYERS = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("model")
    return {tie: str(tiny_model_folder(parent / f"tie {tie}", layers=LAYERS, tie=tie)) for tie in (True, False)}


def live_bytes():
    """Bytes of the distinct blocks of memory of all tensors that exist."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and not thing.is_meta]
    return sum(storage.nbytes() for storage in distinct_storages(found, CPU))


class Watch:
    """Notes the live bytes before and after each call of `fully_shard`."""

    def __init__(self):
        self.readings = []
        self.shard = fsdp.fully_shard

    def __enter__(self):
        fsdp.fully_shard = self
        self.before = live_bytes()
        return self

    def __exit__(self, *error):
        fsdp.fully_shard = self.shard

    def __call__(self, module, **options):
        self.readings.append(live_bytes())
        self.shard(module, **options)
        self.readings.append(live_bytes())

    @property
    def peak(self):
        return max(self.readings) - self.before


def whole(module):
    source = source_for(module)
    names = [meta.name for meta in source.metadata()]
    with source.gather(names) as tensors:
        return {name: tensors[name].detach().clone() for name in names}


def build(rank, world, folders, options):
    """By tie: peak bytes of the deferred path, bytes at rest, whether all numbers are those of the plain path."""
    found = {}
    for tie, folder in folders.items():
        states, seen = [], {}
        for deferred in (True, False):
            model = load_causal_model(folder, deferred=deferred)
            with Watch() as watch:
                states.append(FSDPBackend(CPU, **options).prepare(Actor(model), optimizer()))
            if deferred:
                seen = {"peak": watch.peak, "rest": states[0].memory.model.nbytes()}
            del model
        for get in ("named_parameters", "named_buffers"):
            ours, plain = (dict(getattr(s.network, get)(remove_duplicate=False)) for s in states)
            assert list(ours) == list(plain)
            for name, tensor in ours.items():
                local, other = (fsdp_local(t) for t in (tensor, plain[name]))
                assert torch.equal(local, other), name
                assert (local.dtype, tensor.requires_grad) == (other.dtype, plain[name].requires_grad), name
        inner = states[0].checkpoint_module
        assert (inner.lm_head.weight is inner.model.embed_tokens.weight) is tie
        ids, weights = rows()
        norms = []
        for state in states:
            backend = FSDPBackend(CPU, **options)
            backend.backward(state, loss_of(state.module, ids, weights), last=True)
            norms.append(backend.optimizer_step(state).grad_norm)
        seen["norms"] = norms
        left, right = (whole(state.checkpoint_module) for state in states)
        assert all(torch.equal(left[name], right[name]) for name in right)
        found[tie] = seen
    critic = FSDPBackend(CPU, **options).prepare(Critic(load_causal_model(folders[True], deferred=True)), optimizer())
    assert not any(p.is_meta for p in critic.network.parameters())
    return found


def fsdp_local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        *(pytest.param(world, {}, marks=pytest.mark.slow) for world in (1, 4)),
        pytest.param(4, {"shard_size": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"cpu_offload": True}, marks=pytest.mark.slow),
    ],
)
def test_no_rank_holds_the_whole_model(folders, world, options):
    results = run_ranks(build, world, folders, options, timeout_seconds=500)
    for tie, folder in folders.items():
        model = load_causal_model(folder)
        sizes = {id(p): p.numel() * 4 for p in model.parameters()}
        block = sum(sizes[id(p)] for p in model.model.layers[0].parameters())
        outside = sum(sizes.values()) - LAYERS * block
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        for found in results:
            seen = found[tie]
            # Shards, what is outside the blocks or one block, and buffers; nothing else that grows with the model.
            assert seen["peak"] <= seen["rest"] + max(block, outside) + buffers + 4096
            if world > 1:
                assert seen["peak"] < 0.8 * sum(sizes.values())
            assert seen["norms"][0] == seen["norms"][1]
