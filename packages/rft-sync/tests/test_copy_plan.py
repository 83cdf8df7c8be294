"""The recorded copies of a vLLM-style loader: fused qkv, gate_up, tensor-parallel slices, padded vocabulary, a tie."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rft_sync import (
    BroadcastConfig,
    BroadcastManager,
    EngineNotReady,
    EngineRefused,
    IncompleteGroup,
    ModuleSource,
    NonFiniteWeight,
    ShapeMismatch,
    UnknownTensor,
    VerificationFailed,
    build_manifest,
    verify,
)
from rft_sync.receivers.copy_plan import CopyRecorder
from rft_sync.receivers.vllm import VLLMReceiver

HEADS, KV_HEADS, DIM, WIDTH, ROWS, PADDED = 4, 2, 2, 8, 10, 12


class Trainer(nn.Module):
    """Checkpoint names of a small decoder layer."""

    def __init__(self, seed=0, tied=False):
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(ROWS, WIDTH)
        self.model.q_proj = nn.Linear(WIDTH, HEADS * DIM)
        self.model.k_proj = nn.Linear(WIDTH, KV_HEADS * DIM)
        self.model.v_proj = nn.Linear(WIDTH, KV_HEADS * DIM)
        self.model.o_proj = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.model.gate_proj = nn.Linear(WIDTH, 6, bias=False)
        self.model.up_proj = nn.Linear(WIDTH, 6, bias=False)
        self.model.norm = nn.LayerNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


class EngineModel(nn.Module):
    """What a vLLM model is to its loader: fused, sliced and padded parameters with weight loaders."""

    def __init__(self, rank=0, world=1, tied=False, loader="plain"):
        super().__init__()
        self.rank, self.world, self.loader = rank, world, loader
        split = lambda rows, columns: nn.Parameter(torch.full((rows, columns), -7.0), requires_grad=False)  # noqa: E731
        qkv = (HEADS + 2 * KV_HEADS) * DIM // world
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = split(PADDED // world, WIDTH)
        self.qkv_proj, self.o_proj, self.gate_up_proj = nn.Module(), nn.Module(), nn.Module()
        self.qkv_proj.weight = split(qkv, WIDTH)
        self.qkv_proj.bias = nn.Parameter(torch.zeros(qkv), requires_grad=False)
        self.o_proj.weight = split(WIDTH, HEADS * DIM // world)
        self.gate_up_proj.weight = split(12 // world, WIDTH)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.lm_head = nn.Module()
        self.lm_head.weight = self.embed_tokens.weight if tied else split(PADDED // world, WIDTH)

    def _rows(self, tensor, world_rows):
        return tensor.narrow(0, self.rank * world_rows, world_rows)

    def _vocabulary(self, parameter, tensor):
        rows = PADDED // self.world
        begin = self.rank * rows
        mine = tensor[begin : begin + rows]
        parameter.data[: mine.shape[0]].copy_(mine)
        parameter.data[mine.shape[0] :].fill_(0)

    def load_weights(self, pairs):
        done = set()
        parameters = dict(self.named_parameters(remove_duplicate=False))
        q, kv = HEADS * DIM // self.world, KV_HEADS * DIM // self.world
        starts = {"q_proj": (0, q), "k_proj": (q, kv), "v_proj": (q + kv, kv)}
        for full_name, tensor in pairs:
            name = full_name.removeprefix("model.")
            part, _, kind = name.partition(".")
            if part in starts:
                start, rows = starts[part]
                target = f"qkv_proj.{kind}"
                piece = self._rows(tensor, rows)
                if self.loader == "computed" and part == "v_proj":
                    piece = piece * 1.0
                parameters[target].data.narrow(0, start, rows).copy_(piece)
            elif part in ("gate_proj", "up_proj"):
                rows = 6 // self.world
                target = f"gate_up_proj.{kind}"
                parameters[target].data[rows * (part == "up_proj") :][:rows].copy_(self._rows(tensor, rows))
            elif part == "o_proj":
                columns = HEADS * DIM // self.world
                target = name
                parameters[target].data.copy_(tensor.narrow(1, self.rank * columns, columns))
            elif part in ("embed_tokens", "lm_head"):
                target = name
                self._vocabulary(parameters[target], tensor)
            else:
                target = name
                if self.loader == "gap":
                    parameters[target].data[1:].copy_(tensor[1:])
                elif self.loader == "twice":
                    parameters[target].data.copy_(tensor)
                    parameters[target].data[:2].copy_(tensor[2:4])
                elif self.loader == "host":
                    for index in range(len(tensor)):
                        parameters[target].data[index].fill_(tensor[index].item())
                else:
                    parameters[target].data.copy_(tensor)
            done.add(target)
        return done


class FakeLLM:
    """The calls of `vllm.LLM` that the receiver makes."""

    def __init__(self, model, lora=False):
        self.model, self.unfinished, self.tags, self.resets, self.refuse = model, False, set(), [], False
        config = SimpleNamespace(quantization=None, dtype=torch.float32, get_vocab_size=lambda: ROWS)
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=config, lora_config=object() if lora else None),
            has_unfinished_requests=lambda: self.unfinished,
            is_sleeping=lambda: bool(self.tags),
            reset_encoder_cache=lambda: self.resets.append("encoder"),
            set_weight_version=lambda version: self.resets.append(version),
            engine_core=SimpleNamespace(
                engine_core=SimpleNamespace(model_executor=SimpleNamespace(sleeping_tags=self.tags))
            ),
        )

    def apply_model(self, function):
        torch.rand(3)  # engines draw from the trainer's generators
        return [function(self.model)]

    def collective_rpc(self, function):
        runner = SimpleNamespace(reset_lora_state=lambda: self.resets.append("lora"))
        return [function(SimpleNamespace(model_runner=runner))]

    def reset_prefix_cache(self):
        self.resets.append("prefix")
        return not self.refuse

    def reset_mm_cache(self):
        self.resets.append("multimodal")

    def wake_up(self, tags):
        self.tags.difference_update(tags)


def _expected(trainer, rank, world, tied=False):
    """Slices by hand."""
    model = EngineModel(rank, world, tied)
    model.load_weights(trainer.state_dict().items())
    return model.state_dict()


def _manager(trainer, llm, **config):
    receiver = VLLMReceiver(llm, live_layout=True)
    return BroadcastManager(ModuleSource(trainer), receiver, BroadcastConfig(bucket_bytes=300, **config))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (1, 2)])
def test_replayed_copies_equal_the_loader_for_every_slice(rank, world, tied):
    trainer, llm = Trainer(1, tied), FakeLLM(EngineModel(rank, world, tied))
    manager = _manager(trainer, llm, verify="all")
    identities = {name: (id(p), p.data_ptr()) for name, p in llm.model.named_parameters()}
    assert manager.broadcast_to_engine().tensors_verified > 0
    assert manager.receiver.plan_refusal == ""
    llm.model.load_weights = None  # from here on nothing but the plan may write
    for _ in range(2):
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.mul_(1.5)
            for parameter in llm.model.parameters():
                parameter.fill_(-1.0)  # memory that slept
        report = manager.broadcast_to_engine()
        for name, value in _expected(trainer, rank, world, tied).items():
            assert torch.equal(llm.model.state_dict()[name], value), name
        assert report.tensors_verified == report.tensors_sent - tied
    assert identities == {name: (id(p), p.data_ptr()) for name, p in llm.model.named_parameters()}


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ("computed", "written from a tensor that was not sent"),
        ("gap", "written 0 to 1 times"),
        ("twice", "written 1 to 2 times"),
        ("host", "host|single element"),
    ],
)
def test_a_loader_that_cannot_be_followed_is_kept(loader, reason):
    trainer, llm = Trainer(1), FakeLLM(EngineModel(loader=loader))
    manager = _manager(trainer, llm)
    manager.broadcast_to_engine()
    assert re.search(reason, manager.receiver.plan_refusal)
    with torch.no_grad():
        trainer.model.norm.weight.add_(1.0)
    report = manager.broadcast_to_engine()
    assert report.tensors_verified == 0  # what cannot be followed cannot be read back, and the report says so
    other = EngineModel(loader=loader)
    other.load_weights(trainer.state_dict().items())
    assert torch.equal(llm.model.norm.weight[1:], other.norm.weight[1:])
    assert torch.equal(llm.model.qkv_proj.weight, other.qkv_proj.weight)


def test_verification_reads_the_live_slices():
    trainer, llm = Trainer(1), FakeLLM(EngineModel(1, 2))
    manager = _manager(trainer, llm)
    manager.broadcast_to_engine()
    with torch.no_grad():
        llm.model.qkv_proj.weight[[4, 5]] = llm.model.qkv_proj.weight[[5, 4]].clone()  # rows of k
    with pytest.raises(VerificationFailed) as caught:
        verify(manager.source, manager.receiver)
    assert caught.value.names == ("model.k_proj.weight",)


def test_caches_are_reset_after_every_update_and_random_state_is_kept():
    llm = FakeLLM(EngineModel())
    manager = _manager(Trainer(1), llm)
    for version in ("1", "2"):
        llm.resets.clear()
        manager.broadcast_to_engine()
        assert llm.resets == ["prefix", "multimodal", "encoder", "lora", version]
    before = torch.get_rng_state()
    manager.receiver.start(build_manifest(manager.source.metadata(), bucket_bytes=300))
    manager.receiver.cancel()
    assert torch.equal(before, torch.get_rng_state())
    llm.refuse = True
    with pytest.raises(EngineRefused, match="prefix cache"):
        manager.broadcast_to_engine()
    assert not manager.receiver.session.usable


def test_engine_states_and_sizes_are_refused_before_anything_is_written():
    llm = FakeLLM(EngineModel())
    manager = _manager(Trainer(1), llm)
    llm.unfinished = True
    with pytest.raises(EngineNotReady, match="unfinished"):
        manager.broadcast_to_engine()
    llm.unfinished = False
    llm.tags.update({"weights", "kv_cache"})
    with pytest.raises(EngineNotReady, match="asleep"):
        manager.broadcast_to_engine()
    waking = BroadcastManager(manager.source, manager.receiver, BroadcastConfig(on_asleep="wake"))
    waking.broadcast_to_engine()
    assert llm.tags == {"kv_cache"}  # the cache comes back after the update, not before
    llm.llm_engine.vllm_config.model_config.get_vocab_size = lambda: 99
    with pytest.raises(ShapeMismatch, match="10 rows and the engine's vocabulary 99"):
        manager.broadcast_to_engine()
    llm.llm_engine = None
    with pytest.raises(EngineNotReady, match="gone"):
        manager.broadcast_to_engine()


def test_incomplete_updates_are_named():
    llm = FakeLLM(EngineModel())
    trainer = Trainer(1)
    trainer.model.norm = nn.Identity()
    with pytest.raises(UnknownTensor, match=r"norm\.weight"):
        _manager(trainer, llm).broadcast_to_engine()
    receiver = VLLMReceiver(llm, live_layout=True)
    source = ModuleSource(Trainer(1))
    manifest = build_manifest(source.metadata(), bucket_bytes=1 << 20)
    receiver.start(manifest)
    from rft_sync import plan_buckets

    qkv = [m for m in manifest.metadata if "q_proj" in m.name]
    with source.gather([m.name for m in qkv]) as tensors, pytest.raises(IncompleteGroup, match="k_proj"):
        receiver.load(plan_buckets(qkv, 1 << 20)[0].filled(tensors))


def test_a_failed_update_goes_back_to_the_loader():
    llm = FakeLLM(EngineModel())
    trainer = Trainer(1)
    manager = _manager(trainer, llm)
    manager.broadcast_to_engine()
    llm.refuse = True
    with pytest.raises(EngineRefused):
        manager.broadcast_to_engine()
    assert not manager.receiver.session.usable
    llm.refuse = False
    loads = []
    load = llm.model.load_weights
    llm.model.load_weights = lambda pairs: loads.append(1) or load(pairs)
    with torch.no_grad():
        trainer.lm_head.weight[0, 0] = 1.0
    manager.broadcast_to_engine()
    assert loads
    assert manager.receiver.session.usable
    for name, value in _expected(trainer, 0, 1).items():
        assert torch.equal(llm.model.state_dict()[name], value)


def test_live_tensors_are_checked_before_anything_is_written():
    trainer, llm = Trainer(1), FakeLLM(EngineModel())
    manager = _manager(trainer, llm)
    manager.broadcast_to_engine()
    before = {name: value.clone() for name, value in llm.model.state_dict().items()}
    with torch.no_grad():
        trainer.model.embed_tokens.weight.add_(1.0)
        trainer.lm_head.weight[0, 0] = float("inf")
    with pytest.raises(NonFiniteWeight, match=r"lm_head\.weight"):
        manager.broadcast_to_engine()
    assert all(torch.equal(before[name], value) for name, value in llm.model.state_dict().items())
    assert manager.receiver.session.usable  # the engine still has the last version, whole
    assert manager.receiver.session.version == manager.version == 1


@pytest.mark.parametrize("verify_mode", ["all", "rotating", "off"])
def test_masters_are_cast_on_the_way_without_a_copy(verify_mode):
    trainer, engine = Trainer(1), EngineModel().bfloat16()
    llm = FakeLLM(engine)
    llm.llm_engine.vllm_config.model_config.dtype = torch.bfloat16
    source = ModuleSource(trainer, dtype=torch.bfloat16)
    receiver = VLLMReceiver(llm, live_layout=True)
    manager = BroadcastManager(source, receiver, BroadcastConfig(verify=verify_mode))
    manager.broadcast_to_engine()
    gathers = []
    gather = source.gather
    source.gather = lambda names: gathers.append(names) or gather(names)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    report = manager.broadcast_to_engine()
    assert gathers == []
    assert report.tensors_sent == report.tensors_loaded
    expected = EngineModel().bfloat16()
    expected.load_weights((name, value.bfloat16()) for name, value in trainer.state_dict().items())
    for name, value in expected.state_dict().items():
        assert torch.equal(engine.state_dict()[name], value), name


def test_tensors_that_moved_are_found_on_both_sides():
    trainer, llm = Trainer(1), FakeLLM(EngineModel())
    manager = _manager(trainer, llm, verify="all")
    manager.broadcast_to_engine()
    manager.broadcast_to_engine()
    with torch.no_grad():
        trainer.model.norm.weight = nn.Parameter(torch.randn(WIDTH))  # another tensor under the name
        trainer.model.o_proj.weight.data = torch.randn(WIDTH, HEADS * DIM)  # other memory under the parameter
        llm.model.qkv_proj.weight = nn.Parameter(torch.zeros_like(llm.model.qkv_proj.weight), requires_grad=False)
        llm.model.norm.weight.data = torch.zeros(WIDTH)
    manager.broadcast_to_engine()
    for name, value in _expected(trainer, 0, 1).items():
        assert torch.equal(llm.model.state_dict()[name], value), name
    llm.model.norm.extra = nn.Parameter(torch.zeros(2), requires_grad=False)  # another layout: recorded anew
    with pytest.raises(UnknownTensor, match=r"norm\.extra"):
        manager.broadcast_to_engine()


def test_a_planted_fault_is_found_when_live_tensors_are_copied():
    trainer, llm = Trainer(1), FakeLLM(EngineModel(1, 2))
    manager = _manager(trainer, llm, verify="all")
    manager.broadcast_to_engine()
    load_live = manager.receiver.load_live

    def faulty(tensors):
        load_live(tensors)
        llm.model.gate_up_proj.weight.data[0, 0] += 1.0  # gate_proj's row of this rank

    manager.receiver.load_live = faulty
    with pytest.raises(VerificationFailed) as caught:
        manager.broadcast_to_engine()
    assert caught.value.names == ("model.gate_proj.weight",)
    assert (manager.version, manager.receiver.session.usable) == (1, False)


def test_full_weights_end_the_life_of_an_adapter():
    llm = FakeLLM(EngineModel(), lora=True)
    manager = _manager(Trainer(1), llm)
    removed = []
    llm.llm_engine.remove_lora = removed.append
    manager.broadcast_to_engine()
    assert removed == []
    manager.receiver.lora_request = object()
    manager.broadcast_to_engine()
    assert (removed, manager.receiver.lora_request) == ([1], None)


def test_layers_whose_kernels_read_something_else_are_not_written_live():
    from rft_sync.receivers.vllm_model import _is_derived

    class RoutedExperts(nn.Module):
        pass

    class UnquantizedFusedMoEMethod:
        pass

    stacked, by_method, absorbed = nn.Module(), nn.Module(), nn.Module()
    stacked.w13_weight = nn.Parameter(torch.zeros(1))
    by_method.quant_method = UnquantizedFusedMoEMethod()
    absorbed.W_UV = torch.zeros(1)
    assert all(_is_derived(module) for module in (RoutedExperts(), stacked, by_method, absorbed))
    assert not any(_is_derived(module) for module in EngineModel().modules())


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([], (0, 0)),
        ([((12,), (1,), 0)], (1, 1)),
        ([((2, 3), (3, 1), 0), ((6,), (1,), 6)], (1, 1)),
        ([((2, 3), (3, 1), 0), ((6,), (1,), 5)], (0, 2)),
        ([((12,), (1,), 0), ((1, 4), (99, 1), 2), ((4,), (1,), 2)], (1, 3)),
        ([((4, 2), (3, 1), 0), ((4, 1), (3, 1), 2)], (1, 1)),  # columns
        ([((4, 2), (3, 1), 0), ((4, 2), (3, 1), 1)], (1, 2)),
        ([((3,), (0,), 0)], (0, 2)),  # one element over and over: more than once
    ],
)
def test_how_often_each_element_is_written(pieces, expected):
    from rft_sync.receivers.copy_plan import Region, _times_written

    assert _times_written(12, [Region("w", *piece) for piece in pieces]) == expected


def test_an_empty_live_parameter_refuses_the_plan():
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(torch.zeros(0))
    recorder = CopyRecorder(model)
    assert recorder.plan() is None
    assert "live layout" in recorder.refusal
