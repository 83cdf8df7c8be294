"""Guarantees of an update in one process: counts, versions, verification, refusals."""

import copy

import pytest
import torch
from torch import nn

from rft_sync import (
    BroadcastConfig,
    BroadcastManager,
    IncompleteGroup,
    ManifestMismatch,
    ModuleReceiver,
    ModuleSource,
    NonFiniteWeight,
    PrefixMap,
    RecordingReceiver,
    ShapeMismatch,
    UnknownTensor,
    VerificationFailed,
    source_for,
    verify,
)


class Net(nn.Module):
    def __init__(self, seed=0, tied=True, vocabulary=5):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, 4)
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.up_a, self.up_b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.register_buffer("router_bias", torch.zeros(3))
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)


def _connect(model=None, engine=None, **config):
    model, engine = model or Net(1), engine or Net(2)
    return BroadcastManager.connect(model, engine, BroadcastConfig(**config)), model, engine


def _equal(model, engine):
    return all(torch.equal(engine.state_dict()[name], value) for name, value in model.state_dict().items())


def test_one_line_connects_one_line_sends():
    manager, model, engine = _connect(bucket_bytes=64)
    report = manager.broadcast_to_engine()
    assert _equal(model, engine)
    assert engine.lm_head.weight is engine.embed.weight
    assert report.tensors_sent == report.tensors_loaded == report.tensors_expected == len(model.state_dict()) == 13
    assert (report.version, report.parameters, report.buffers, report.aliases, report.skipped_buffers) == (
        1,
        11,
        1,
        1,
        1,
    )
    assert report.nbytes == 4 * (5 * 4 + (4 * 4 + 4) * 3 + (4 * 2 + 2) * 2 + 3)
    assert report.tensors_verified == 13
    assert set(report.seconds) == {"wake", "gather", "cast", "load", "finish", "verify", "total"}
    assert report.gigabytes_per_second == pytest.approx(report.nbytes / 1e9 / report.seconds["total"])
    assert "13 tensors" in str(report)


def test_buffers_are_sent_and_scratch_buffers_are_not():
    manager, model, engine = _connect()
    model.router_bias += 1.0
    manager.broadcast_to_engine()
    assert engine.router_bias.tolist() == [1.0, 1.0, 1.0]
    assert engine.scratch.tolist() == [2.0, 2.0]


def test_versions_count_finished_updates_and_sleep_options_do_not_matter():
    manager, model, engine = _connect()
    for step in (1, 2):
        with torch.no_grad():
            model.q_proj.weight.fill_(float(step))
        assert manager.broadcast_to_engine().version == step
        assert engine.q_proj.weight[0, 0] == step
    assert manager.broadcast_to_engine(version=2).version == 2  # a re-send
    with pytest.raises(ManifestMismatch, match="version 1 is older"):
        manager.broadcast_to_engine(version=1)
    for wrong in (3.0, "3", True):
        with pytest.raises(ManifestMismatch, match=f"version {wrong!r} is no count"):
            manager.broadcast_to_engine(version=wrong)
    assert manager.version == 2


def test_after_a_resume_the_first_update_carries_the_resumed_step():
    manager, model, engine = _connect()
    with torch.no_grad():
        model.embed.weight += 5.0
    assert manager.broadcast_to_engine(version=5).version == 5
    assert _equal(model, engine)
    assert manager.receiver.session.version == 5


def test_master_precision_is_cast_once_by_name():
    engine = Net(2).bfloat16()
    engine.router_bias = engine.router_bias.float()
    manager, model, _ = _connect(engine=engine)
    with torch.no_grad():
        model.q_proj.weight.fill_(1.0009765625)  # 1 + 2**-10
        model.router_bias.fill_(1.0009765625)
    report = manager.broadcast_to_engine()
    assert engine.q_proj.weight.unique().tolist() == [1.0]
    assert engine.router_bias.tolist() == [1.0009765625] * 3  # fp32 in the engine: exact
    assert report.casts == {"float32->bfloat16": 11}
    metadata = {meta.name: meta for meta in manager.source.metadata()}
    assert metadata["q_proj.weight"].nbytes == 2 * 16  # bf16 on the wire
    assert model.q_proj.weight.unique().tolist() == [1.0009765625]


def test_mixed_dtypes_arrive_exactly():
    model = nn.ParameterDict(
        {"a": torch.ones(3).bfloat16(), "b": torch.full((3,), 1 + 2.0**-20), "c": torch.ones(2).half()}
    )
    receiver = RecordingReceiver()
    BroadcastManager(ModuleSource(model), receiver).broadcast_to_engine()
    assert {name: tensor.dtype for name, tensor in receiver.tensors.items()} == {
        "a": torch.bfloat16,
        "b": torch.float32,
        "c": torch.float16,
    }
    assert torch.equal(receiver.tensors["b"], model["b"])


@pytest.mark.parametrize("fault", ["flipped bit", "swapped tensors", "permuted rows", "stale tensor"])
def test_planted_faults_are_found_by_name(fault):
    manager, model, engine = _connect()
    manager.broadcast_to_engine()
    with torch.no_grad():
        if fault == "flipped bit":
            engine.up_a.weight.view(-1).view(torch.int32)[6] ^= 1
        elif fault == "swapped tensors":
            engine.up_a.weight.copy_(model.up_b.weight)
            engine.up_b.weight.copy_(model.up_a.weight)
        elif fault == "permuted rows":
            engine.up_a.weight.copy_(model.up_a.weight[[1, 0, 2, 3]])
        else:
            model.up_a.weight += 1.0
    wrong = ("up_a.weight", "up_b.weight") if fault == "swapped tensors" else ("up_a.weight",)
    with pytest.raises(VerificationFailed) as caught:
        verify(manager.source, manager.receiver)
    assert caught.value.names == wrong
    assert verify(manager.source, manager.receiver, ["q_proj.weight"]).names == ("q_proj.weight",)


class Lossy(ModuleReceiver):
    """An engine that silently drops one tensor."""

    drop = "v_proj.weight"

    def load(self, bucket):
        keep = self._places["v_proj.weight"].view().clone()
        super().load(bucket)
        if self.drop in bucket.names:
            self._places[self.drop].view().copy_(keep)


def test_a_failed_verification_makes_the_receiver_unusable_until_a_full_update():
    model, engine = Net(1), Net(2)
    receiver = Lossy(engine)
    manager = BroadcastManager(source_for(model), receiver)
    with pytest.raises(VerificationFailed, match=r"v_proj\.weight"):
        manager.broadcast_to_engine()
    assert (manager.version, receiver.session.version, receiver.session.usable) == (0, None, False)
    receiver.drop = None
    manager.broadcast_to_engine()
    assert (manager.version, receiver.session.usable) == (1, True)


def test_the_rotating_sample_finds_a_fault_within_one_round():
    model, engine = Net(1), Net(2)
    receiver = Lossy(engine)
    receiver.drop = None
    manager = BroadcastManager(source_for(model), receiver, BroadcastConfig(verify_sample=4))
    manager.broadcast_to_engine()
    receiver.drop = "v_proj.weight"
    found = 0
    for _ in range(4):  # 13 names, 4 an update
        with torch.no_grad():
            model.v_proj.weight += 1.0
        try:
            assert manager.broadcast_to_engine().tensors_verified == 4
        except VerificationFailed:
            found += 1
            break
    assert found == 1
    receiver.drop = None
    assert manager.broadcast_to_engine().tensors_verified == 13  # whatever the failed update left is looked at
    assert manager.broadcast_to_engine().tensors_verified == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused_by_name(value):
    manager, model, engine = _connect()
    with torch.no_grad():
        model.k_proj.bias[1] = value
    with pytest.raises(NonFiniteWeight) as caught:
        manager.broadcast_to_engine()
    assert caught.value.names == ("k_proj.bias",)
    free = BroadcastManager.connect(model, engine, BroadcastConfig(check_finite=False))
    free.broadcast_to_engine()
    assert torch.equal(engine.k_proj.bias, model.k_proj.bias) or value != value


def test_large_finite_weights_are_no_false_alarm():
    model = nn.Linear(64, 64).half()
    with torch.no_grad():
        model.weight.fill_(60000.0)
    receiver = RecordingReceiver()
    BroadcastManager(ModuleSource(model), receiver).broadcast_to_engine()
    assert receiver.tensors["weight"].max() == 60000.0
    huge = nn.Linear(64, 64)
    with torch.no_grad():
        huge.weight.fill_(3e38)  # the sum overflows, the weights do not
    BroadcastManager(ModuleSource(huge), receiver).broadcast_to_engine()


def test_shape_dtype_and_name_mismatches_are_refused_before_anything_is_written():
    engine = Net(2)
    before = copy.deepcopy(engine.state_dict())
    with pytest.raises(ShapeMismatch, match=r"\(6, 4\).*\(5, 4\)"):
        _connect(Net(1, vocabulary=6), engine)[0].broadcast_to_engine()
    other = Net(1)
    other.extra = nn.Linear(1, 1)
    with pytest.raises(UnknownTensor, match=r"extra\.weight"):
        _connect(other, engine)[0].broadcast_to_engine()
    fewer = Net(1)
    del fewer.up_a
    with pytest.raises(UnknownTensor, match=r"needs \['up_a\.bias', 'up_a\.weight'\]"):
        _connect(fewer, engine)[0].broadcast_to_engine()
    part = Net(1)
    del part.k_proj
    with pytest.raises(IncompleteGroup, match="k_proj"):
        _connect(part, nn.ModuleDict({"a": Net(2)}).a)[0].broadcast_to_engine()
    with pytest.raises(ManifestMismatch, match="ties"):
        _connect(Net(1, tied=False), engine)[0].broadcast_to_engine()
    assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())


def test_a_refused_start_leaves_the_receiver_usable():
    manager, model, _ = _connect()
    manager.broadcast_to_engine()
    model.extra = nn.Linear(1, 1)
    with pytest.raises(UnknownTensor):
        manager.broadcast_to_engine()
    assert manager.receiver.session.usable
    assert manager.version == 1


def test_vocabulary_padding_is_refused_with_the_numbers_or_zeroed():
    model, engine = Net(1, vocabulary=5), Net(2, vocabulary=8)
    with pytest.raises(ShapeMismatch, match="pad_vocabulary"):
        BroadcastManager.connect(model, engine).broadcast_to_engine()
    receiver = ModuleReceiver(engine, pad_vocabulary=True)
    report = BroadcastManager(source_for(model), receiver).broadcast_to_engine()
    assert report.tensors_verified == 13
    assert torch.equal(engine.embed.weight[:5], model.embed.weight)
    assert engine.embed.weight[5:].abs().sum() == 0
    with pytest.raises(ShapeMismatch, match=r"\(8, 4\).*\(5, 4\)"):  # more rows than the engine has
        BroadcastManager.connect(engine, model).broadcast_to_engine()


def test_an_untied_engine_takes_a_tied_model():
    manager, model, engine = _connect(engine=Net(2, tied=False))
    manager.broadcast_to_engine()
    assert torch.equal(engine.lm_head.weight, model.embed.weight)
    assert engine.lm_head.weight is not engine.embed.weight


def test_renamed_engines():
    model = nn.ModuleDict({"model": nn.Linear(2, 2)})
    engine = nn.ModuleDict({"language_model": nn.ModuleDict({"model": nn.Linear(2, 2).bfloat16()})})
    receiver = ModuleReceiver(engine, rename=PrefixMap({"model.": "language_model.model."}))
    report = BroadcastManager(source_for(model), receiver).broadcast_to_engine()
    assert report.tensors_verified == 2
    assert torch.equal(engine.language_model.model.weight, model.model.weight.bfloat16())
