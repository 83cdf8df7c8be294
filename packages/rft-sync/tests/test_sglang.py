"""SGLang by its signatures: a recording engine that answers as the releases do."""

import pytest
import torch
from torch import nn

from rft_sync import (
    BroadcastConfig,
    BroadcastManager,
    EngineNotReady,
    EngineRefused,
    ModuleSource,
    SGLangReceiver,
    UnsupportedCombination,
    VerificationFailed,
    receiver_for,
)


class Answer:
    def __init__(self, success, message=""):
        self.success, self.message = success, message


class Engine:
    """Before 0.5.21: no session."""

    def __init__(self):
        self.weights, self.calls, self.busy, self.adapters = {}, [], False, {}

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        self.calls.append(("update", [name for name, _ in named_tensors], load_format, flush_cache))
        self.pending = named_tensors  # an engine that copies after it has answered
        return self._store()

    def _store(self):
        self.weights.update(self.pending)
        return True, "Success"

    def flush_cache(self):
        self.calls.append(("flush",))
        return Answer(not self.busy)

    def get_weights_by_name(self, name, truncate_size=100):
        found = self.weights.get(name)
        return None if found is None or name == "bias" else found[:truncate_size].tolist()

    def load_lora_adapter_from_tensors(self, lora_name, tensors, config_dict, load_format=None):
        if lora_name in self.adapters:
            return Answer(False, f"{lora_name} is loaded already")
        self.adapters[lora_name] = (tensors, config_dict)
        return Answer(True)

    def unload_lora_adapter(self, lora_name):
        del self.adapters[lora_name]
        return Answer(True)


class SessionEngine(Engine):
    """From 0.5.21: updates outside a session are refused by a flag and not by an exception."""

    inside = False

    def begin_weight_update(self, selector="target"):
        self.calls.append(("begin",))
        self.inside = True
        return True, ""

    def _store(self):
        return super()._store() if self.inside else (False, "must run between begin and end")

    def end_weight_update(self):
        self.calls.append(("end",))
        self.inside = False
        return True, ""


class Net(nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(4, 3)


def _manager(engine, **config):
    return BroadcastManager.connect(Net(), engine, BroadcastConfig(bucket_bytes=16, **config))


@pytest.mark.parametrize("kind", [Engine, SessionEngine])
def test_updates_reach_the_engine_and_are_read_back(kind):
    engine = kind()
    manager = _manager(engine)
    assert isinstance(manager.receiver, SGLangReceiver)
    model = manager.source.model
    for version in (1, 2):
        with torch.no_grad():
            model.weight.add_(1.0)
        report = manager.broadcast_to_engine()
        assert report.version == version
        assert report.tensors_verified == 1  # the engine cannot show the bias
        assert torch.equal(engine.weights["weight"], model.weight)
        assert engine.weights["weight"].data_ptr() != model.weight.data_ptr()
    kinds = [call[0] for call in engine.calls]
    session = ["begin"] if kind is SessionEngine else []
    end = ["end"] if kind is SessionEngine else []
    assert kinds == (["flush", *session, "update", "update", *end, "flush"]) * 2
    assert all(call[3] is False for call in engine.calls if call[0] == "update")


def test_a_returned_flag_is_an_error():
    class Forgetful(SessionEngine):
        def begin_weight_update(self, selector="target"):
            return True, ""  # but does not open

    with pytest.raises(EngineRefused, match="must run between"):
        _manager(Forgetful()).broadcast_to_engine()

    class Refusing(SessionEngine):
        def end_weight_update(self):
            return False, "post-processing failed"

    engine = Refusing()
    manager = _manager(engine)
    with pytest.raises(EngineRefused, match="post-processing failed"):
        manager.broadcast_to_engine()
    assert not manager.receiver.session.usable
    assert "post-processing" in manager.receiver.session.reason

    class Dead(Engine):
        def update_weights_from_tensor(self, *args, **options):
            raise BrokenPipeError("the scheduler has exited")

    with pytest.raises(EngineRefused, match="scheduler has exited"):
        _manager(Dead()).broadcast_to_engine()


def test_running_requests_are_refused_before_anything_is_sent():
    engine = Engine()
    engine.busy = True
    with pytest.raises(EngineNotReady, match="requests are running"):
        _manager(engine).broadcast_to_engine()
    assert engine.weights == {}


def test_names_dropped_in_silence_are_found_by_verification():
    class Dropping(Engine):
        def _store(self):
            self.weights.update({name: torch.zeros_like(tensor) for name, tensor in self.pending})
            return True, "Success"

    with pytest.raises(VerificationFailed, match="weight"):
        _manager(Dropping()).broadcast_to_engine()


def test_adapters_replace_each_other():
    peft = pytest.importorskip("peft")
    from rft_sync import AdapterSource

    base = nn.Sequential()
    base.add_module("q_proj", Net())
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    engine = Engine()
    manager = BroadcastManager(AdapterSource(model), receiver_for(engine), BroadcastConfig(verify="off"))
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.base_model.model.q_proj.lora_B["default"].weight.fill_(value)
        manager.broadcast_to_engine()
        tensors, config = engine.adapters[manager.receiver.lora_name]
        assert tensors["base_model.model.q_proj.lora_B.weight"].unique().tolist() == [value]
        assert config["r"] == 2
    assert len(engine.adapters) == 1
    merged = BroadcastManager.connect(model, engine, BroadcastConfig(verify="off"))
    merged.receiver.lora_name = manager.receiver.lora_name
    merged.broadcast_to_engine()
    assert (engine.adapters, merged.receiver.lora_name) == ({}, None)  # not added to weights that hold it already
    manager.receiver.lora_name = None
    engine.__class__ = type("Engine", (), {"flush_cache": Engine.flush_cache, "update_weights_from_tensor": None})
    with pytest.raises(UnsupportedCombination, match="adapter-only"):
        manager.broadcast_to_engine()


def test_ranks_without_an_engine_only_gather():
    receiver = SGLangReceiver(None)
    report = BroadcastManager(ModuleSource(Net()), receiver).broadcast_to_engine()
    assert (report.tensors_loaded, report.tensors_verified) == (2, 0)
    assert receiver.session.usable
