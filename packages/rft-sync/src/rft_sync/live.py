"""The tensors of a live model under names without wrappers. No communication, nothing is copied."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rft_sync.errors import UnsupportedCombination

# Children under which other libraries hide the module they wrap.
_WRAPPER_CHILDREN = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "DeepSpeedEngine": "module",
}
_CHECKPOINT_CHILD = "_checkpoint_wrapped_module"
_REFUSED = {
    "FullyShardedDataParallel": "FSDP1 (FullyShardedDataParallel) and weight sync: shard with fully_shard (FSDP2)",
    "PipelineEngine": "DeepSpeed pipeline parallelism and weight sync: train with ZeRO or FSDP2",
}

InnerModule = Callable[[nn.Module], nn.Module | None]


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A parameter or persistent buffer, by owner: read at the time of use, because wrappers replace parameters."""

    name: str
    owner: nn.Module
    attribute: str
    buffer: bool = False

    @property
    def tensor(self) -> Tensor:
        """What the owner holds now."""
        found = (self.owner._buffers if self.buffer else self.owner._parameters)[self.attribute]
        assert found is not None  # the walk lists only what exists
        return found


def is_kind(module: object, *names: str) -> bool:
    """Whether a class of `module` has one of `names`: told without importing the library that defines it."""
    return any(base.__name__ in names for base in type(module).__mro__)


def inner_module(module: nn.Module) -> nn.Module | None:
    """The module that `module` merely wraps (DDP, torch.compile, activation checkpointing, DeepSpeed), or None."""
    for base in type(module).__mro__:
        if base.__name__ in _REFUSED:
            raise UnsupportedCombination(_REFUSED[base.__name__])
        child = _WRAPPER_CHILDREN.get(base.__name__)
        if child is not None and isinstance(getattr(module, child, None), nn.Module):
            return getattr(module, child)  # type: ignore[no-any-return]
    return module._modules.get(_CHECKPOINT_CHILD)


def unwrap(model: nn.Module, inner: InnerModule = inner_module) -> nn.Module:
    """`model` without the wrappers around it."""
    while (wrapped := inner(model)) is not None:
        model = wrapped
    return model


def walk_modules(
    module: nn.Module, prefix: str = "", inner: InnerModule = inner_module
) -> Iterator[tuple[str, nn.Module]]:
    """`(prefix, module)` of every module once per name, wrappers left out of the names. The prefix ends with a dot."""
    module = unwrap(module, inner)
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from walk_modules(child, f"{prefix}{name}.", inner)


def live_tensors(model: nn.Module) -> tuple[list[LiveTensor], list[str]]:
    """Parameters and persistent buffers of `model` in definition order, and the names of non-persistent buffers.

    A tensor that two modules share is listed under both names.
    """
    found: list[LiveTensor] = []
    skipped: list[str] = []
    for prefix, module in walk_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.append(LiveTensor(prefix + name, module, name))
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if name in module._non_persistent_buffers_set:
                skipped.append(prefix + name)
            else:
                found.append(LiveTensor(prefix + name, module, name, buffer=True))
    return found, skipped


def check_sendable(name: str, tensor: Tensor, *, buffer: bool) -> None:
    """Refuse what cannot be read as plain numbers.

    Raises:
        UnsupportedCombination: Meta tensors, quantised parameters, tensor subclasses other than DTensor.
    """
    if tensor.is_meta:
        raise UnsupportedCombination(
            f"meta parameter {name} and weight sync: it has no values; materialise the model first", [name]
        )
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise UnsupportedCombination(f"lazy parameter {name} and weight sync: run a forward first", [name])
    kind = type(tensor)
    plain = kind in (Tensor, nn.Parameter, nn.Buffer) or kind.__name__ == "DTensor"
    if not plain and not hasattr(tensor, "ds_id"):
        raise UnsupportedCombination(
            f"{kind.__name__} (quantised or otherwise wrapped) parameter {name} and weight sync: "
            "send from a full-precision copy",
            [name],
        )
    if not buffer and (not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype.itemsize < 2):
        raise UnsupportedCombination(
            f"quantised parameter {name} ({tensor.dtype}) and weight sync: send from a full-precision copy", [name]
        )


class LiveTensors(dict[str, Tensor]):
    """Name -> live tensor.

    Attributes:
        token: The same object as long as the tensors are the same ones at the same addresses. Whoever has worked out
            something from them keeps the token and not the tensors, whose memory is the trainer's to free.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], token: object) -> None:
        super().__init__(tensors)
        self.token = token


def same_memory(tensor: Tensor) -> tuple[object, ...]:
    """A key that is equal for tensors which are views of the same bytes in the same way (tied weights)."""
    if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not hasattr(tensor, "ds_id") and tensor.numel():
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.layout is torch.strided and not tensor.is_meta:
            return place
    return (id(tensor),)


def tensor_trace(model: nn.Module) -> tuple[object, ...]:
    """A value that changes when a module or tensor of `model` is added, renamed, shared, replaced, moved or reshaped.

    Taken at every update, so it walks the modules without recursion and makes one tuple a tensor.
    """
    found: list[object] = []
    add = found.append
    seen: set[int] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        key = id(module)
        if key in seen:
            add(key)
            continue
        seen.add(key)
        if module._parameters or module._buffers:
            add((key, type(module)))
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        add((name, *_whereabouts(tensor)))
        if module._modules:
            add(tuple(module._modules))
            waiting.extend(child for child in module._modules.values() if child is not None)
    return tuple(found)


def _whereabouts(tensor: Tensor) -> tuple[object, ...]:
    shard = getattr(tensor, "ds_tensor", None)
    local = getattr(tensor, "_local_tensor", tensor) if shard is None else shard
    address = 0 if local.is_meta else local.data_ptr()
    return id(tensor), id(shard), address, tensor.dtype, tensor.shape, local.stride()
