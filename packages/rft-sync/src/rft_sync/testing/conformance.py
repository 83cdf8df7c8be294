"""Checks that any source or receiver must pass; run them on yours."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rft_sync.errors import EngineNotReady, UnknownTensor, WeightSyncError
from rft_sync.manifest import Manifest, build_manifest
from rft_sync.parameters import Bucket, ParamMeta
from rft_sync.receivers.protocol import WeightReceiver
from rft_sync.sources.protocol import ParameterSource


class ConformanceError(AssertionError):
    """A source or receiver breaks its protocol; the message says which rule."""


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise ConformanceError(rule)


def _refused(step: Callable[[], object], kind: type[Exception], rule: str) -> None:
    try:
        step()
    except kind:
        return
    except Exception as error:
        raise ConformanceError(f"{rule}; it raised {type(error).__name__}: {error}") from error
    raise ConformanceError(f"{rule}; it raised nothing")


def check_source(source: ParameterSource, reference: Mapping[str, Tensor]) -> int:
    """Check `source` against the values it should send. Collective over the source's ranks: all call it alike.

    Args:
        source: A source over a model whose weights do not change meanwhile.
        reference: Checkpoint name -> whole tensor; cast to the dtype that the source announces.

    Returns:
        Number of checks that passed.

    Raises:
        ConformanceError: The first rule that is broken.
    """
    metadata = tuple(source.metadata())
    names = [meta.name for meta in metadata]
    by_name = {meta.name: meta for meta in metadata}
    _require(tuple(source.metadata()) == metadata, "metadata() is the same when nothing changed")
    _require(len(by_name) == len(names), "metadata() names each tensor once")
    _require(set(names) == set(reference), f"metadata() names the model: differs in {set(names) ^ set(reference)}")
    for meta in metadata:
        _require(meta.shape == tuple(reference[meta.name].shape), f"{meta.name} has its global shape")
        if meta.alias_of is not None:
            _require(by_name.get(meta.alias_of) is not None, f"the original of alias {meta.name} is sent too")
            _require(names.index(meta.alias_of) < names.index(meta.name), f"{meta.name} comes after its original")
    _check_gather(source, by_name, names, reference, "all names at once")
    for name in reversed(names):
        _check_gather(source, by_name, [name], reference, "one name, last first")
    _check_gather(source, by_name, names[1::2], reference, "every second name")
    _check_gather(source, by_name, [], reference, "no name")
    _refused(lambda: source.gather(["no.such.tensor"]).__enter__(), UnknownTensor, "an unknown name is refused")
    _check_gather(source, by_name, names, reference, "all names after a refusal")
    _require(tuple(source.metadata()) == metadata, "gather leaves metadata() as it was")
    return 8 + 2 * len(names)


def _check_gather(
    source: ParameterSource,
    metadata: Mapping[str, ParamMeta],
    names: Sequence[str],
    reference: Mapping[str, Tensor],
    what: str,
) -> None:
    """Collective over the source's ranks."""
    with source.gather(names) as tensors:
        _require(list(tensors) == list(names), f"gather gives what was asked, in order ({what})")
        for name, tensor in tensors.items():
            meta = metadata[name]
            _require(tensor.dtype == meta.dtype, f"{name} has the announced dtype ({what})")
            _require(not tensor.requires_grad, f"{name} is detached ({what})")
            expected = reference[name].detach().to(device=tensor.device, dtype=meta.dtype)
            _require(torch.equal(tensor, expected), f"{name} has the model's values ({what})")


def check_receiver(
    make_receiver: Callable[[], WeightReceiver],
    weights: Mapping[str, Tensor],
    read: Callable[[WeightReceiver], Mapping[str, Tensor]],
) -> int:
    """Check the receivers that `make_receiver` builds. No communication of its own.

    Args:
        make_receiver: A fresh receiver over a fresh engine.
        weights: Checkpoint name -> tensor: a full set for that engine.
        read: Receiver -> the engine's present weights, by the same names.

    Returns:
        Number of checks that passed.

    Raises:
        ConformanceError: The first rule that is broken.
    """
    metadata = [ParamMeta(name=name, shape=tuple(t.shape), dtype=t.dtype) for name, t in weights.items()]
    manifest = build_manifest(metadata, bucket_bytes=max(1, sum(meta.nbytes for meta in metadata) // 3))
    buckets = manifest.buckets()
    receiver = make_receiver()
    first = buckets[0].filled(weights)
    _refused(lambda: receiver.load(first), WeightSyncError, "load before start is refused")
    _refused(lambda: receiver.finish(1), WeightSyncError, "finish before start is refused")
    receiver.start(manifest)
    _refused(lambda: receiver.start(manifest), EngineNotReady, "a second start inside an update is refused")
    receiver.load(first)
    if len(buckets) > 1:
        _refused(lambda: receiver.finish(1), WeightSyncError, "finish before everything was loaded is refused")
    receiver.abort("planned by the check")
    _full_update(receiver, manifest, weights)
    _compare(read(receiver), weights, "a full update after a failed one")
    changed = {name: tensor * 2 if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    _full_update(receiver, manifest, changed)
    _compare(read(receiver), changed, "a second update replaces the first")
    wrong = build_manifest(
        [*metadata, ParamMeta(name="no.such.tensor", shape=(1,), dtype=torch.float32)], bucket_bytes=1 << 20
    )
    if hasattr(receiver, "expected"):
        _refused(lambda: receiver.start(wrong), UnknownTensor, "a tensor that the engine lacks is refused")
        fewer = build_manifest(metadata[1:], bucket_bytes=1 << 20)
        _refused(lambda: receiver.start(fewer), WeightSyncError, "a missing tensor is refused")
        _compare(read(receiver), changed, "a refused start writes nothing")
    return 9


def _full_update(receiver: WeightReceiver, manifest: Manifest, weights: Mapping[str, Tensor]) -> None:
    """One update whose bucket memory is overwritten as soon as the protocol allows it."""
    receiver.start(manifest)
    for bucket in manifest.buckets():
        flat = torch.empty(max(1, bucket.nbytes), dtype=torch.uint8)
        bucket.filled(weights).pack(flat)
        _load(receiver, bucket.unpacked(flat))
        flat.fill_(255)
    receiver.finish(1)


def _load(receiver: WeightReceiver, bucket: Bucket) -> None:
    handle = receiver.load(bucket)
    if handle is not None:
        handle.wait()


def _compare(found: Mapping[str, Tensor], weights: Mapping[str, Tensor], what: str) -> None:
    for name, tensor in weights.items():
        _require(name in found, f"{name} can be read ({what})")
        _require(torch.equal(found[name], tensor.to(found[name].dtype)), f"{name} has the sent values ({what})")
