"""Forecast bytes against the bytes of live tensor storages, on every backend.

The two kinds of test differ in who holds the model: reinforcement with its frozen model, and a warm start on its own.
"""

from dataclasses import replace

import pytest
import torch

from rft_dist.testing import run_ranks
from rft_trainer.config import RFTConfig
from rft_trainer.memory.backward import reduced_bytes
from rft_trainer.memory.build import configured_forecast, warm_start_shapes
from rft_trainer.memory.forecast import Cluster, frozen_bytes, trained_bytes
from rft_trainer.memory.shapes import model_shapes, read_config
from rft_trainer.models import Actor, load_causal_model, padded_layout
from rft_trainer.roles import build_policy
from rft_trainer.strategy import DeepspeedBackend, FSDPBackend
from rft_trainer.strategy.residency import storage_bytes
from rft_trainer.testing import tiny_model_folder
from rft_trainer.warm_start import imitating_policy

STEPPED = {"warm_start_steps": 3, "warm_start_batch_size": 8, "warm_start_micro_batch_size": 2}
SHORT = {"prompt_max_len": 40, "generate_max_len": 60}
WARM_CASES = {
    "fsdp2": {"fsdp": True},
    "fsdp2-lower-layers-fixed": {"fsdp": True, "freeze": ("model.embed_tokens", "model.layers.0.")},
    # Adapters come with reinforcement only: supervised steps train whole weights.
    "fsdp2-lora": {"fsdp": True, "lora_rank": 4},
    "zero0": {"zero_stage": 0},
    "zero2": {"zero_stage": 2, "lora_rank": 4},
    "zero3": {"zero_stage": 3},
}
CASES = {
    "fsdp2": {"fsdp": True},
    "fsdp2-lora": {"fsdp": True, "lora_rank": 4},
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero2-lora": {"zero_stage": 2, "lora_rank": 4},
}

HALF = ("zero2 bf16", "zero3 bf16")
"""Cases whose gradients are parts in fp32 beside weights in bfloat16."""
CASES |= {name: CASES[name.partition(" ")[0]] for name in HALF}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny", hidden=128, layers=3))


def local_gradients(backend, state, weights):
    """Bytes of this rank's gradients after a backward, beside `weights` bytes of the model."""
    if isinstance(backend, FSDPBackend):
        return state.memory.model.nbytes() - weights
    return storage_bytes(backend._local_gradients(state), torch.device("cpu"))


class KeptForBackward:
    """Counts what autograd keeps while it is entered, the model's own weights left out."""

    def __init__(self, model):
        self._model = model
        self._kept = {}

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        weights = {p.untyped_storage().data_ptr() for p in self._model.parameters() if not hasattr(p, "to_local")}
        if storage.data_ptr() not in weights:
            # held, so that no other takes its address
            self._kept[storage.data_ptr()] = tensor
        return tensor

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def nbytes(self):
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())


class Reductions:
    """Most bytes that FSDP2 holds for one reduction: whole gradients, and the buffer that they are sent from."""

    def __init__(self):
        self.most = 0

    def watch(self, patch):
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

        copy_in = collectives.foreach_reduce_scatter_copy_in

        def watched(gradients, buffer, *rest):
            held = sum(tensor.untyped_storage().nbytes() for tensor in (*gradients, buffer))
            self.most = max(self.most, held)
            return copy_in(gradients, buffer, *rest)

        patch.setattr(collectives, "foreach_reduce_scatter_copy_in", watched)


def measure_warm_start(rank, world, cases):
    """case -> owner -> bytes on this rank, of a supervised step on a micro-batch of the longest answers."""
    device = torch.device("cpu")
    found = {}
    for name, config in cases.items():
        backend = FSDPBackend(device) if config.fsdp else DeepspeedBackend(device, stage=config.zero_stage)
        policy = imitating_policy(config, config.pretrain, bf16=False)
        state = backend.prepare(policy, config.warm_start_optimizer(config.warm_start_steps))
        rows = min(config.warm_start_micro_batch_size, config.warm_start_batch_size // world)
        prompts, answers = ([torch.arange(1, n + 1)] * rows for n in (config.prompt_max_len, config.generate_max_len))
        weights = state.memory.model.nbytes()
        kept = KeptForBackward(state.network)
        with kept.hooks():
            loss = -state.module(padded_layout(prompts, answers, 0)).log_probs.sum()
        activations = kept.nbytes()
        reductions = Reductions()
        with pytest.MonkeyPatch.context() as patch:
            reductions.watch(patch)
            backend.backward(state, loss, last=True)
        state.release_gathered()
        gradients = local_gradients(backend, state, weights)
        backend.optimizer_step(state)
        found[name] = {
            "one reduction": reductions.most,
            "actor": weights,
            "gradients": gradients,
            "actor optimiser": state.memory.optimizer.nbytes(),
            "activations": activations,
        }
    return found


def measure(rank, world, cases):
    """case -> bytes of (weights, gradients, optimiser, frozen model) on this rank."""
    device = torch.device("cpu")
    found = {}
    for name, config in cases.items():
        bf16 = name in HALF
        if config.fsdp:
            backend = FSDPBackend(device, bf16=bf16)
        else:
            backend = DeepspeedBackend(device, stage=config.zero_stage, bf16=bf16)
        state = backend.prepare(build_policy(config, config.pretrain, bf16=bf16), config.actor_optimizer())
        frozen = backend.prepare_frozen(Actor(load_causal_model(config.pretrain)))
        layout = padded_layout([torch.arange(1, 5)], [torch.arange(5, 12)], 0)
        weights = state.memory.model.nbytes()
        backend.backward(state, -state.module(layout).log_probs.sum(), last=True)
        state.release_gathered()
        gradients = local_gradients(backend, state, weights)
        backend.optimizer_step(state)
        found[name] = weights, gradients, state.memory.optimizer.nbytes(), backend.memory_of(frozen).nbytes()
    return found


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ("fsdp2", "zero2", "zero3", "zero2 bf16")),
        *(pytest.param(world, tuple(CASES), marks=pytest.mark.slow) for world in (1, 2, 4)),
    ],
)
def test_each_owner_is_within_a_tenth(folder, world, names):
    cases = {name: replace(RFTConfig(pretrain=folder), **CASES[name]) for name in names}
    base = model_shapes(read_config(folder))
    for found in run_ranks(measure, world, cases, timeout_seconds=550):
        for name, config in cases.items():
            cluster = Cluster(ranks=world, device_bytes=None, bf16=name in HALF)
            shapes = model_shapes(read_config(folder), adapters=config.adapters(config.seed))
            state = trained_bytes(shapes, config, cluster)
            expected = (state.weights, state.gradients, state.optimizer, frozen_bytes(base, config, cluster))
            got = list(found[name])
            if config.zero_stage == 1 and not config.fsdp:
                # Whole gradients are there until the reduction, which has happened when they are measured.
                assert got[1] < state.gradients
                got[1] = state.gradients
            assert got == pytest.approx(expected, rel=0.1), name


@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, ("fsdp2-lora", "fsdp2-lower-layers-fixed", "zero2")),
        *(pytest.param(world, tuple(WARM_CASES), marks=pytest.mark.slow) for world in (1, 2, 4)),
    ],
)
def test_each_owner_of_a_warm_start_is_within_a_tenth(folder, world, names):
    cases = {name: RFTConfig(pretrain=folder, **STEPPED, **SHORT, **WARM_CASES[name]) for name in names}
    cluster = Cluster(ranks=world, device_bytes=None, bf16=False)
    files = {folder: read_config(folder)}
    for found in run_ranks(measure_warm_start, world, cases, timeout_seconds=550):
        for name, config in cases.items():
            made = configured_forecast(config, cluster, files, warm_starts=True)
            expected = dict(made.phases["warm_start"])
            for passing in ("gathered weights", "gradients in flight", "reduce bucket"):
                expected.pop(passing, None)
            shapes = warm_start_shapes(config, files[folder])
            expected["one reduction"] = max(reduced_bytes(shapes, config, cluster)) if config.fsdp else 0
            assert found[name] == pytest.approx(expected, rel=0.1), name
