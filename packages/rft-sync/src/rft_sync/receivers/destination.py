"""Where each checkpoint tensor belongs in a live module, stacked and fused parameters included."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rft_sync.errors import UnsupportedCombination
from rft_sync.live import LiveTensor, check_sendable, live_tensors, same_memory, unwrap
from rft_sync.naming import NameUnit, checkpoint_units
from rft_sync.partition import Whole, placement_of


@dataclass(frozen=True, slots=True)
class Destination:
    """A strided piece of one live tensor. `strides` is None where it is all of it."""

    live: LiveTensor
    shape: tuple[int, ...]
    offset: int = 0
    strides: tuple[int, ...] | None = None

    def view(self) -> Tensor:
        """The piece as the owner holds it now; writing to it writes into the module."""
        tensor = self.live.tensor.detach()
        if self.strides is None:
            return tensor
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset)


def destinations(module: nn.Module) -> dict[str, Destination]:
    """Checkpoint name -> place in `module`, for every parameter and persistent buffer. No communication.

    Raises:
        UnsupportedCombination: Sharded, meta or quantised modules, or a stacked parameter whose pieces are no strided
            views of it.
    """
    inner = unwrap(module)
    live = {item.name: item for item in live_tensors(inner)[0]}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, item in live.items():
        check_sendable(name, item.tensor, buffer=item.buffer)
        placement = placement_of(name, item.tensor)
        if not isinstance(placement, Whole):
            raise UnsupportedCombination(f"a sharded receiving module ({name}) and ModuleReceiver: give a whole module")
        shapes[name] = placement.shape
    found: dict[str, Destination] = {}
    for unit in checkpoint_units(inner, shapes):
        if unit.convert is None:
            found[unit.checkpoint[0]] = Destination(live[unit.live[0]], unit.shapes[0])
        else:
            found.update(_pieces(unit, live))
    return found


def _pieces(unit: NameUnit, live: Mapping[str, LiveTensor]) -> dict[str, Destination]:
    """Run the conversion on positions instead of values to learn where each checkpoint tensor comes from."""
    assert unit.convert is not None
    if len(unit.live) != 1:
        raise UnsupportedCombination(
            f"a checkpoint tensor made of several live ones ({unit.live}) and ModuleReceiver: send to a module of the "
            "trainer's own layout",
            unit.live,
        )
    item = live[unit.live[0]]
    tensor = item.tensor
    if not tensor.is_contiguous():
        raise UnsupportedCombination(f"non-contiguous stacked parameter {item.name} and ModuleReceiver", [item.name])
    positions = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
    return {name: _strided(item, name, index) for name, index in unit.convert({item.name: positions}).items()}


def _strided(item: LiveTensor, name: str, index: Tensor) -> Destination:
    if index.numel() == 0:
        return Destination(item, tuple(index.shape), 0, (0,) * index.dim())
    start = int(index[(0,) * index.dim()])
    strides = []
    for dim, size in enumerate(index.shape):
        strides.append(int(index.select(dim, 1)[(0,) * (index.dim() - 1)]) - start if size > 1 else 0)
    rebuilt = torch.full((), start, device=index.device)
    for dim, (size, stride) in enumerate(zip(index.shape, strides, strict=True)):
        steps = torch.arange(size, device=index.device) * stride
        rebuilt = rebuilt.unsqueeze(-1) + steps if dim else rebuilt + steps
    if not torch.equal(rebuilt, index) or any(stride < 0 for stride in strides):
        raise UnsupportedCombination(
            f"{name} is no strided piece of {item.name} and ModuleReceiver: use the trainer's own layout",
            [name],
        )
    return Destination(item, tuple(index.shape), start, tuple(strides))


def tied_names(places: Mapping[str, Destination]) -> dict[str, str]:
    """Name -> the first name that has the same memory, for whole tensors that the module ties."""
    first: dict[object, str] = {}
    ties: dict[str, str] = {}
    for name, place in places.items():
        if place.strides is None:
            original = first.setdefault(same_memory(place.live.tensor), name)
            if original != name:
                ties[name] = original
    return ties
