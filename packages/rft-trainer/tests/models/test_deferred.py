"""Weights that wait in their files: the plain model bit by bit once they are read, and nothing in memory before."""

import gc
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft_trainer.models import Actor, AdapterConfig, Critic, load_causal_model
from rft_trainer.models.deferred import deferred_causal_model, settle
from rft_trainer.testing import tiny_model_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny", tie=request.param))


def assert_equal(left, right):
    for get in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(m, get)(remove_duplicate=False)) for m in (left, right))
        assert list(ours) == list(theirs)
        for name, tensor in ours.items():
            other = theirs[name]
            assert torch.equal(tensor, other), name
            assert (tensor.dtype, tensor.requires_grad) == (other.dtype, other.requires_grad), name


def waiting(model):
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_the_plain_one_once_it_is_read(folder, dtype):
    plain = load_causal_model(folder, dtype=dtype)
    model = load_causal_model(folder, dtype=dtype, deferred=True)
    assert waiting(model) == [name for name, _ in model.named_parameters()]
    settle(model, CPU)
    assert_equal(model, plain)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is plain.config.tie_word_embeddings
    assert model.training is plain.training
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()
    assert model.config.to_dict() == plain.config.to_dict()


def test_one_block_alone(folder):
    model = load_causal_model(folder, deferred=True)
    settle(model.model.layers[1], CPU)
    assert not [name for name in waiting(model) if ".layers.1." in name]
    assert [name for name in waiting(model) if ".layers.0." in name]
    read = {id(p) for p in model.model.layers[1].parameters()}
    settle(model, CPU)
    assert read == {id(p) for p in model.model.layers[1].parameters()}
    assert_equal(model, load_causal_model(folder))


def test_what_stands_around_the_model_begins_alike(folder):
    options = AdapterConfig(rank=2, alpha=4.0, seed=3)
    actors = [Actor(load_causal_model(folder, deferred=deferred)) for deferred in (True, False)]
    for actor in actors:
        actor.add_adapters(options)
    # The adapters are there, the weights below are not.
    assert all("lora_" not in name for name in waiting(actors[0]))
    assert len(waiting(actors[0])) == len(list(load_causal_model(folder).named_parameters()))
    settle(actors[0], CPU)
    assert_equal(*actors)
    frozen = [Actor(load_causal_model(folder, deferred=deferred)) for deferred in (True, False)]
    for actor in frozen:
        actor.freeze(["model.layers.0"])
        settle(actor, CPU)
    assert_equal(*frozen)
    critics = [Critic(load_causal_model(folder, deferred=deferred)) for deferred in (True, False)]
    settle(critics[0], CPU)
    assert_equal(*critics)


def test_nothing_is_in_memory_before_it_is_read(folder):
    others = cpu_tensors()
    model = load_causal_model(folder, deferred=True)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert bytes_beside(others) <= buffers
    settle(model, CPU)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert bytes_beside(others) == buffers + weights


def cpu_tensors():
    gc.collect()
    # Not isinstance: it asks every object for its class, and old names in torch warn when they are asked.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    # Sparse tensors of other tests have no storage of their own.
    return [tensor for tensor in found if tensor.device.type == "cpu" and tensor.layout is torch.strided]


def bytes_beside(others):
    """Bytes of the memory of all CPU tensors, each block once, without that of `others`, whom the list keeps alive."""
    known = {tensor.untyped_storage().data_ptr() for tensor in others}
    storages = [tensor.untyped_storage() for tensor in cpu_tensors()]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in known}.values())


def rewritten(folder, target, change):
    """A copy of the checkpoint whose tensors `change` has changed."""
    from shutil import copytree

    copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_what_cannot_wait_is_loaded_as_ever(folder, tmp_path):
    def cut(tensors):
        tensors.pop("model.norm.weight")

    def rename(tensors):
        tensors["norm.weight"] = tensors.pop("model.norm.weight")

    for number, change in enumerate((cut, rename)):
        other = rewritten(folder, tmp_path / str(number), change)
        assert deferred_causal_model(other, dtype=torch.float32) is None
        assert not waiting(load_causal_model(str(other), deferred=True))
    pickled = rewritten(folder, tmp_path / "pickled", lambda tensors: None)
    (pickled / "model.safetensors").rename(pickled / "other.safetensors")
    assert deferred_causal_model(pickled, dtype=torch.float32) is None


def test_a_damaged_file_is_left_to_transformers_to_complain_of(folder, tmp_path):
    other = rewritten(folder, tmp_path / "damaged", lambda tensors: None)
    weights = other / "model.safetensors"
    names = list(load_file(weights))
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert deferred_causal_model(other, dtype=torch.float32) is None
    # Behind an index the damage shows later.
    index = other / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, weights.name)}))
    assert deferred_causal_model(other, dtype=torch.float32) is None
    index.unlink()
    kinds = []
    for deferred in (True, False):
        with pytest.raises(Exception, match=r".") as caught:
            load_causal_model(str(other), deferred=deferred)
        kinds.append((caught.type, str(caught.value)))
    assert kinds[0] == kinds[1]


def test_two_entries_for_a_tied_weight_are_left_to_transformers(tmp_path):
    tied = tiny_model_folder(tmp_path / "tied")

    def both(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    other = rewritten(tied, tmp_path / "both", both)
    assert deferred_causal_model(other, dtype=torch.float32) is None


def test_several_files(folder, tmp_path):
    model = load_causal_model(folder)
    model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    deferred = load_causal_model(str(tmp_path / "parts"), deferred=True)
    assert waiting(deferred)
    settle(deferred, CPU)
    assert_equal(deferred, model)
