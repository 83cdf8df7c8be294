"""Training in the engine's own memory: the trainer's parameters become views of the engine's, fused ones included.

An update then copies nothing, and one whole copy of the weights is saved. It needs one trainer and one engine that hold
every weight whole, on one device and in one dtype, and an engine that never drops or moves its weights.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rft_sync.errors import UnsupportedCombination
from rft_sync.receivers.protocol import SharingReceiver
from rft_sync.receivers.replay import same_place
from rft_sync.sources.assembly import CheckpointSource
from rft_sync.sources.whole import ZeroSource


def check_sharing(source: Any, receiver: Any) -> None:
    """Whether the trainer of `source` may train in the engine's memory, as far as it can be told before an update.

    No communication.

    Raises:
        UnsupportedCombination: Lists every reason against it.
    """
    reasons = [*_source_refusals(source)]
    if not isinstance(receiver, SharingReceiver):
        reasons.append(f"{type(receiver).__name__} gives no access to the engine's memory")
    elif receiver.sharing_refusal():
        reasons.append(receiver.sharing_refusal())
    if reasons:
        raise UnsupportedCombination(f"share_weights: {'; '.join(reasons)}; set share_weights=False to copy")


def _source_refusals(source: Any) -> list[str]:
    if not isinstance(source, CheckpointSource):
        return [f"{type(source).__name__} does not show its live tensors"]
    if isinstance(source, ZeroSource):
        return ["DeepSpeed keeps its parameters in buffers of its own"]
    live = source.live()
    if live is None:
        return [
            "the trainer's weights are sharded over ranks, merged with adapters, or named otherwise in a checkpoint"
        ]
    cast = [
        f"{meta.name} is {live[meta.name].dtype} and is sent as {meta.dtype}"
        for meta in source.metadata()
        if meta.alias_of is None and live[meta.name].dtype != meta.dtype
    ]
    return [f"{len(cast)} tensors have another dtype in the engine ({cast[0]})"] if cast else []


@torch.no_grad()
def share_weights(source: CheckpointSource, receiver: SharingReceiver) -> int:
    """Make the parameters of `source` views of the engine's memory, which an update has just filled.

    Parameters stay the same objects, so optimisers go on. Nothing is changed when it is refused. No communication.

    Returns:
        Number of tensors that share memory now; buffers are not among them and are copied as before.

    Raises:
        UnsupportedCombination: Lists the tensors for which the engine has no memory of their own.
    """
    check_sharing(source, receiver)
    homes: dict[str, tuple[nn.Parameter, Tensor]] = {}
    refused: list[str] = []
    for name, (parameter, local) in source.live_parameters().items():
        home = receiver.home(name, local)
        if home is None or home.dtype != local.dtype or home.device != local.device or home.is_inference():
            refused.append(name)
        else:
            homes[name] = (parameter, home)
    if refused:
        raise UnsupportedCombination(
            f"share_weights and tensors that the engine does not hold whole in a place of their own: {refused}; set "
            "share_weights=False to copy",
            refused,
        )
    moved_shards = False
    for parameter, home in homes.values():
        if hasattr(parameter, "_local_tensor"):
            parameter._local_tensor, moved_shards = home, True
        else:
            parameter.data = home
    if moved_shards:
        source.model.load_state_dict({}, strict=False)  # FSDP2 looks anew where its shards are after any load
    return len(homes)


def shared_tensors(source: CheckpointSource, receiver: SharingReceiver) -> bool:
    """Whether every parameter of `source` is the engine's memory. No communication."""
    found = source.live_parameters()
    for name, (_, local) in found.items():
        home = receiver.home(name, local)
        if home is None or not same_place(home, local):
            return False
    return bool(found)
