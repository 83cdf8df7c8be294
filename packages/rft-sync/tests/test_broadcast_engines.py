"""Updates into engine objects, odd modules and wrong configurations, in one process."""

import pytest
import torch
from torch import nn

from rft_sync import (
    BroadcastConfig,
    BroadcastManager,
    EngineNotReady,
    ModuleReceiver,
    ModuleSource,
    NonFiniteWeight,
    RecordingReceiver,
    UnknownTensor,
    UnsupportedCombination,
    WeightSyncError,
    build_manifest,
    receiver_for,
    source_for,
    verify,
)
from rft_sync.testing import check_receiver, check_source


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


def test_double_start_gone_and_unknown_engines():
    manager, model, _ = _connect()
    manager.receiver.start(build_manifest(manager.source.metadata(), bucket_bytes=1 << 20))
    with pytest.raises(EngineNotReady, match="inside an update"):
        manager.broadcast_to_engine()
    manager.receiver.close()
    with pytest.raises(EngineNotReady, match="gone"):
        manager.broadcast_to_engine()
    with pytest.raises(EngineNotReady, match="gone"):
        receiver_for(None)
    with pytest.raises(UnsupportedCombination, match=r"builtins\.int"):
        BroadcastManager.connect(model, 3)


class Engine:
    """An engine object of another package, by duck typing."""

    def __init__(self, module, state="ready"):
        self.native, self.state, self.calls = module, state, []

    def wake_up(self, tags):
        self.calls.append(("wake_up", tuple(tags)))
        self.state = "weights_awake"

    def begin_weight_update(self):
        self.calls.append(("begin",))

    def finish_weight_update(self, version):
        self.calls.append(("finish", version))

    def abort_weight_update(self, reason):
        self.calls.append(("abort", reason))


def test_sleeping_and_closed_engines():
    engine = Engine(Net(2), "asleep")
    model = Net(1)
    with pytest.raises(EngineNotReady, match="asleep"):
        BroadcastManager.connect(model, engine).broadcast_to_engine()
    assert engine.calls == []
    manager = BroadcastManager.connect(model, engine, BroadcastConfig(on_asleep="wake"))
    manager.broadcast_to_engine()
    assert engine.calls == [("wake_up", ("weights",)), ("begin",), ("finish", 1)]
    assert _equal(model, engine.native)
    with torch.no_grad():
        model.q_proj.bias[0] = float("nan")
    with pytest.raises(NonFiniteWeight):
        manager.broadcast_to_engine()
    assert engine.calls[-1][0] == "abort"
    engine.state = "closed"
    with pytest.raises(EngineNotReady, match="closed"):
        manager.broadcast_to_engine()
    engine.state = "updating"  # a session that the caller opened stays the caller's
    with torch.no_grad():
        model.q_proj.bias[0] = 0.0
    calls = len(engine.calls)
    manager.broadcast_to_engine()
    assert len(engine.calls) == calls


class Cancels(Engine):
    """As rft-engines' engines: a refused update may be taken back."""

    def cancel_weight_update(self):
        self.calls.append(("cancel",))


def test_a_refusal_before_anything_is_written_leaves_the_engine_object_as_it_was():
    engine, model = Cancels(Net(2)), Net(1)
    manager = BroadcastManager.connect(model, engine)
    model.extra = nn.Linear(1, 1)
    with pytest.raises(UnknownTensor, match=r"extra\.weight"):
        manager.broadcast_to_engine()
    assert engine.calls == [("begin",), ("cancel",)]
    del model.extra
    with torch.no_grad():
        model.q_proj.bias[0] = float("nan")  # found before the first copy from live tensors
    with pytest.raises(NonFiniteWeight):
        manager.broadcast_to_engine()
    assert engine.calls[2:] == [("begin",), ("cancel",)]
    assert manager.receiver.session.usable
    manager.receiver.load_live = lambda tensors: 1 / 0
    with torch.no_grad():
        model.q_proj.bias[0] = 0.0
    with pytest.raises(WeightSyncError, match="ZeroDivisionError"):
        manager.broadcast_to_engine()
    assert engine.calls[4:] == [("begin",), ("abort", "WeightSyncError: ZeroDivisionError: division by zero")]
    assert not manager.receiver.session.usable


class Silent:
    """A receiver that cannot be read back."""

    def start(self, manifest):
        pass

    def load(self, bucket):
        pass

    def finish(self, version):
        pass

    def abort(self, reason):
        pass


def test_an_engine_that_cannot_be_read_back_is_said_once(caplog):
    manager = BroadcastManager(source_for(Net(1)), Silent())
    assert manager.broadcast_to_engine().tensors_verified == 0
    assert "none of the 13 tensors could be read back through Silent" in caplog.text
    caplog.clear()
    manager.broadcast_to_engine()
    BroadcastManager(source_for(Net(1)), Silent(), BroadcastConfig(verify="off")).broadcast_to_engine()
    _connect()[0].broadcast_to_engine()
    assert caplog.text == ""


def test_verify_refuses_names_that_nobody_sends():
    manager, *_ = _connect()
    manager.broadcast_to_engine()
    with pytest.raises(UnknownTensor, match=r"\['no\.such'\]"):
        verify(manager.source, manager.receiver, ["q_proj.weight", "no.such"])


def test_unreadable_parameters_are_refused_by_name():
    with pytest.raises(UnsupportedCombination, match="meta parameter weight"):
        ModuleSource(nn.Linear(2, 2, device="meta")).metadata()
    quantised = nn.Module()
    quantised.weight = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedCombination, match="quantised parameter weight"):
        ModuleSource(quantised).metadata()
    quantised.weight = nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UnsupportedCombination, match="float8"):
        ModuleSource(quantised).metadata()
    with pytest.raises(UnsupportedCombination, match="lazy parameter"):
        ModuleSource(nn.LazyLinear(2)).metadata()
    with pytest.raises(UnsupportedCombination, match="ParameterSource"):
        source_for({"weight": torch.zeros(1)})


def test_nothing_of_an_earlier_model_is_remembered():
    manager, model, engine = _connect()
    manager.broadcast_to_engine()
    model.q_proj = nn.Linear(4, 4)  # replaced after the first update
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    model.lm_head.weight = model.embed.weight
    manager.broadcast_to_engine()
    assert _equal(model, engine)


def test_compiled_and_checkpointed_wrappers_leave_no_prefix():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Net(1)
    model.q_proj = checkpoint_wrapper(model.q_proj)
    model.k_proj = torch.compile(model.k_proj)
    names = {meta.name for meta in source_for(torch.compile(model)).metadata()}
    assert names == set(Net(1).state_dict())


def test_random_state_of_the_trainer_is_untouched():
    manager, *_ = _connect()
    before = torch.get_rng_state()
    manager.broadcast_to_engine()
    assert torch.equal(before, torch.get_rng_state())


def test_configuration_mistakes_name_field_value_and_remedy():
    for field, value in [
        ("bucket_bytes", 0),
        ("verify", "some"),
        ("verify_sample", 0),
        ("on_asleep", "maybe"),
        ("attendance_seconds", 0),
    ]:
        with pytest.raises(ValueError, match=f"BroadcastConfig.{field} is {value!r}"):
            BroadcastConfig(**{field: value})


def test_conformance_kit_passes_ours_and_catches_faults():
    model = Net(1)
    assert check_source(source_for(model), model.state_dict()) > 8
    with pytest.raises(AssertionError, match="differs"):
        check_source(source_for(model), {"only": torch.zeros(1)})
    weights = {name: tensor.clone() for name, tensor in Net(3).state_dict().items()}
    weights["lm_head.weight"] = weights["embed.weight"]
    untied = {name: tensor.clone() for name, tensor in Net(3, tied=False).state_dict().items()}
    check_receiver(lambda: ModuleReceiver(Net(2, tied=False)), untied, lambda r: r._module.state_dict())
    check_receiver(RecordingReceiver, weights, lambda receiver: receiver.tensors)

    class Keeps(RecordingReceiver):
        def load(self, bucket):
            super().load(bucket)
            self.tensors.update(bucket.tensors)

    with pytest.raises(AssertionError, match="sent values"):
        check_receiver(Keeps, weights, lambda receiver: receiver.tensors)


def test_errors_of_the_engine_are_wrapped_with_their_text():
    class Broken(RecordingReceiver):
        def load(self, bucket):
            raise MemoryError("no room for the bucket")

    manager = BroadcastManager(source_for(Net(1)), Broken())
    with pytest.raises(WeightSyncError, match="MemoryError: no room"):
        manager.broadcast_to_engine()
    assert manager.version == 0
    assert manager.receiver.calls[-1][0] == "abort"
