"""What a trainer may bring along: done rightly, or refused by a name that says both halves."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rft_sync import (
    BroadcastConfig,
    BroadcastManager,
    EngineNotReady,
    FSDPSource,
    ModuleReceiver,
    ModuleSource,
    RecordingReceiver,
    SGLangReceiver,
    ShapeMismatch,
    UnsupportedCombination,
    VLLMReceiver,
    WeightSyncError,
    ZeroSource,
    build_manifest,
    source_for,
)
from rft_sync.testing import spawn_ranks

SMALL, LARGE = 300, 2


def _collectives(rank):
    """One all-gather for all small tensors of a bucket, in the engine's dtype; the large ones by-pass it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from rft_sync import gathering

    torch.manual_seed(0)
    model = nn.Module()
    model.small = nn.ParameterList([nn.Parameter(torch.randn(6, 5)) for _ in range(SMALL)])
    model.large = nn.ParameterList([nn.Parameter(torch.randn(64, 128)) for _ in range(LARGE)])
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if rank == 0:  # planning needs no other rank
        assert [meta.shape for meta in FSDPSource(model).metadata()] == [value.shape for value in expected.values()]
    gathers: list[int] = []
    gather = gathering._all_gather
    gathering._all_gather = lambda output, send, group: gathers.append(output.nbytes) or gather(output, send, group)

    def full_tensor(self, **options):
        raise AssertionError("full_tensor is a collective per parameter")

    DTensor.full_tensor, kept = full_tensor, DTensor.full_tensor
    try:
        found = {}
        for bucket_bytes in (1 << 20, 6000):
            source = FSDPSource(model, dtype=torch.bfloat16, direct_bytes=1 << 13)
            receiver = RecordingReceiver()
            manager = BroadcastManager(source, receiver, BroadcastConfig(bucket_bytes=bucket_bytes, verify="off"))
            gathers.clear()
            report = manager.broadcast_to_engine()
            found[bucket_bytes] = (list(gathers), report.peak_extra_bytes)
            for name, value in expected.items():
                assert torch.equal(receiver.tensors[name], value.bfloat16()), name
    finally:
        gathering._all_gather, DTensor.full_tensor = gather, kept
    return found


def _refused_on_both(rank, model, match):
    with pytest.raises(UnsupportedCombination, match=match):
        BroadcastManager(source_for(model), RecordingReceiver()).broadcast_to_engine()


def _holding(tensor):
    model = nn.Module()
    model.weight = nn.Parameter(tensor)
    return model


def _placements(rank):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    whole = torch.arange(28.0).view(7, 4)
    mesh, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    for placed in (
        distribute_tensor(whole, mesh, [Replicate()]),
        distribute_tensor(whole, mesh, [Shard(0)]),
        distribute_tensor(whole, mesh, [Shard(1)]),
        distribute_tensor(whole, square, [Shard(0), Shard(1)]),
        distribute_tensor(whole, square, [Shard(0), Shard(0)]),
    ):
        receiver = RecordingReceiver()
        BroadcastManager(source_for(_holding(placed)), receiver, BroadcastConfig(verify="all")).broadcast_to_engine()
        assert torch.equal(receiver.tensors["weight"], whole), placed.placements
    _refused_on_both(
        rank, _holding(DTensor.from_local(whole, mesh, [Partial()])), "Partial DTensor weight and weight sync"
    )
    alone = DeviceMesh("cpu", [0])
    held = DTensor.from_local(whole, alone, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    with pytest.raises(UnsupportedCombination, match=r"rank 1: weight lives on a mesh without this rank"):
        BroadcastManager(source_for(_holding(held)), RecordingReceiver()).broadcast_to_engine()


def _first_fsdp(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    first = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    for make in (source_for, ModuleSource, FSDPSource):
        with pytest.raises(UnsupportedCombination, match=r"FSDP1 .*fully_shard \(FSDP2\)"):
            make(first)
    with pytest.raises(UnsupportedCombination, match="FSDP1"):
        source_for(nn.Sequential(nn.Linear(2, 2), first)).metadata()


def _on_two_ranks(rank):
    _placements(rank)
    _first_fsdp(rank)
    return _collectives(rank)


@pytest.fixture(scope="module")
def two_ranks():
    """What each rank found; placements and wrappers were done rightly or refused on both."""
    return spawn_ranks(_on_two_ranks, 2)


def test_a_bucket_takes_one_gather_in_the_engines_dtype_and_at_most_two_buckets_of_memory(two_ranks):
    for found in two_ranks:
        gathers, peak = found[1 << 20]
        # 3 rows of 5 in bf16 are 30 bytes, 32 with alignment, from each of two ranks; the large ones as they are
        assert sorted(gathers) == sorted([SMALL * 32 * 2, *[64 * 128 * 2] * LARGE])
        assert peak <= 2 * (1 << 20)
        gathers, peak = found[6000]
        small = [nbytes for nbytes in gathers if nbytes != 64 * 128 * 2]
        assert sum(small) == SMALL * 32 * 2
        assert len(small) == -(-SMALL // (6000 // 64))  # 60 bytes each, 64 with alignment
        assert peak <= 64 * 128 * 2 + 2 * 6000  # a tensor larger than a bucket is one of its own


class Packed(torch.Tensor):
    """A stand-in for the quantised parameters that other libraries make of tensor subclasses."""


def test_tensor_subclasses_are_refused_by_their_class():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2).as_subclass(Packed), requires_grad=False)
    with pytest.raises(UnsupportedCombination, match=r"Packed .*parameter weight and weight sync") as caught:
        ModuleSource(model)
    assert caught.value.names == ("weight",)


def _partitioned(**shard):
    """A parameter as DeepSpeed's stage 3 leaves it."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_id, parameter.ds_shape = 0, torch.Size([2, 2])
    parameter.ds_tensor = torch.zeros(4)
    parameter.ds_tensor.status = SimpleNamespace(name="AVAILABLE")
    for name, value in shard.items():
        setattr(parameter.ds_tensor, name, value)
    return parameter


def test_zero_3_parameters_that_cannot_be_read_are_refused_by_name():
    model = nn.Module()
    for shard, kind, match in [
        ({"ds_quant_scale": 1.0}, UnsupportedCombination, r"ZeRO-3 quantised weights \(weight\) and weight sync"),
        ({"status": SimpleNamespace(name="NOT_AVAILABLE")}, UnsupportedCombination, "weight offloaded to NVMe"),
    ]:
        model.weight = _partitioned(**shard)
        with pytest.raises(kind, match=match) as caught:
            ZeroSource(model).metadata()
        assert caught.value.names == ("weight",)
    model.weight = _partitioned()
    del model.weight.ds_tensor
    with pytest.raises(EngineNotReady, match=r"weight is not partitioned; finish deepspeed\.initialize first"):
        ZeroSource(model).metadata()


class PipelineEngine(nn.Module):
    """Named as DeepSpeed's."""


def test_pipeline_engines_are_refused():
    with pytest.raises(UnsupportedCombination, match="pipeline parallelism and weight sync"):
        source_for(PipelineEngine())


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer:UserWarning")
def test_adapters_that_cannot_be_merged_or_sent_are_refused_by_name():
    peft = pytest.importorskip("peft")
    from rft_sync import AdapterSource, BaseWeightsSource

    def base():
        model = nn.Sequential()
        model.add_module("conv", nn.Conv2d(4, 4, 2, groups=2))
        model.add_module("q_proj", nn.Linear(4, 4))
        return model

    grouped = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["conv"]))
    with pytest.raises(UnsupportedCombination, match=r"\(conv\) and merged sync: .*ungrouped"):
        source_for(grouped)
    several = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    several.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    several.base_model.set_adapter(["default", "second"])
    with pytest.raises(UnsupportedCombination, match="DoRA and several active adapters"):
        source_for(several)
    with pytest.raises(UnsupportedCombination, match=r"several active adapters .* and AdapterSource"):
        AdapterSource(several)
    with pytest.raises(UnsupportedCombination, match="a model without adapter 'third' and AdapterSource"):
        AdapterSource(several, adapter="third")
    merged = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    merged.merge_adapter()
    with pytest.raises(UnsupportedCombination, match=r"merged in place .*unmerge_adapter\(\) first"):
        BaseWeightsSource(merged)


def test_two_names_that_fall_together_without_wrappers_are_refused():
    model, inner = nn.Module(), nn.Linear(2, 2)
    model.add_module("module", inner)
    wrapper = nn.Module()
    wrapper.add_module("a", model)
    names = [meta.name for meta in ModuleSource(wrapper).metadata()]
    assert names == ["a.module.weight", "a.module.bias"]  # `module` is a wrapper's child only under a wrapper
    source = ModuleSource(inner)
    exports = source._exports()
    source._exports, source._trace = lambda: (exports[0] * 2, exports[1]), None
    with pytest.raises(ShapeMismatch, match="two tensors of the model have one name"):
        source.metadata()


def test_a_second_gather_inside_the_first_is_refused_and_the_first_goes_on():
    source = ModuleSource(nn.Linear(2, 2))
    with source.gather(["weight"]) as tensors:
        with pytest.raises(WeightSyncError, match="a gather of this source is open"):
            source.gather(["bias"]).__enter__()
        assert set(tensors) == {"weight"}
    with source.gather(["bias"]) as tensors:
        assert set(tensors) == {"bias"}


class Gone:
    """A raw `vllm.LLM` in other states than that of being there."""

    def __init__(self, answer):
        self.llm_engine, self._answer = SimpleNamespace(), answer

    def apply_model(self, function):
        return self._answer()


def test_a_vllm_in_another_process_or_none_at_all_is_refused_when_it_is_connected():
    with pytest.raises(UnsupportedCombination, match=r"another process \(PicklingError: no\).*external_launcher"):
        VLLMReceiver(Gone(lambda: (_ for _ in ()).throw(__import__("pickle").PicklingError("no"))))
    with pytest.raises(UnsupportedCombination, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        VLLMReceiver(Gone(lambda: [None]))
    gone = Gone(lambda: [None])
    gone.llm_engine = None
    with pytest.raises(EngineNotReady, match="the vLLM engine is gone"):
        VLLMReceiver(gone)


def test_a_sglang_whose_processes_died_is_not_ready_and_is_left_as_it_was():
    class Dead:
        server_args = SimpleNamespace(tp_size=1, dtype="float32")

        def flush_cache(self):
            raise ConnectionError("the scheduler is gone")

        def update_weights_from_tensor(self, *args, **options):
            raise AssertionError("nothing is sent to a dead engine")

    receiver = SGLangReceiver(Dead())
    manager = BroadcastManager(ModuleSource(nn.Linear(2, 2)), receiver)
    with pytest.raises(EngineNotReady, match=r"does not answer \(ConnectionError: the scheduler is gone\)"):
        manager.broadcast_to_engine()
    assert manager.version == 0
    assert receiver.session.usable


def test_payloads_are_held_until_the_second_next_one_was_answered():
    class Slow:
        server_args = SimpleNamespace(tp_size=1, dtype="float32")

        def __init__(self):
            self.seen = []

        def flush_cache(self):
            return SimpleNamespace(success=True)

        def update_weights_from_tensor(self, payload, **options):
            self.seen.append(payload)  # read only after the next answer, as an engine that answers early does
            for late in self.seen[-2:]:
                for name, tensor in late:
                    assert torch.equal(tensor, torch.full((4,), float(name)))
            return True, ""

    engine = Slow()
    receiver = SGLangReceiver(engine, flush=False)
    metadata = list(ModuleSource(_numbered(5)).metadata())
    manifest = build_manifest(metadata, bucket_bytes=16)
    receiver.start(manifest)
    memory = torch.empty(16, dtype=torch.uint8)  # one buffer for all buckets
    for bucket in manifest.buckets():
        filled = bucket.unpacked(memory)
        for name, tensor in filled:
            tensor.fill_(float(name))
        receiver.load(filled)
        memory.fill_(255)
    assert len(engine.seen) == 5
    receiver.finish(1)


def _numbered(count):
    model = nn.Module()
    for index in range(count):
        model.register_parameter(str(index), nn.Parameter(torch.full((4,), float(index))))
    return model


def test_a_sharded_receiving_module_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    model = nn.Module()
    model.weight = _partitioned(ds_numel=4)
    model.weight.ds_process_group = SimpleNamespace(size=lambda: 2)
    with pytest.raises(UnsupportedCombination, match=r"a sharded receiving module \(weight\) and ModuleReceiver"):
        ModuleReceiver(model)
