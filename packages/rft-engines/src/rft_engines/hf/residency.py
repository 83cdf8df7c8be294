"""Where the parameters of a sleeping module are."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class _Block:
    """One piece of memory and the parameters that lie in it, more than one where weights are tied.

    Attributes:
        size_bytes: of the whole block.
        device: where it was.
        views: (parameter, shape, stride, offset in elements) of each.
        kept: a copy in host memory, None when the content was given up.
    """

    size_bytes: int
    device: torch.device
    views: tuple[tuple[nn.Parameter, torch.Size, tuple[int, ...], int], ...]
    kept: Tensor | None


class ParameterStorage:
    """Frees and brings back the memory of a module's parameters, which stay the same objects.

    Parameters that share memory (tied embeddings) are freed once and share again afterwards; addresses change.
    Buffers stay: they are small, and a weight update does not send those that no checkpoint holds.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._released: list[_Block] = []

    def _shared(self) -> list[list[nn.Parameter]]:
        """Parameters by the memory they lie in."""
        groups: dict[int, list[nn.Parameter]] = {}
        for parameter in self._model.parameters():
            groups.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
        return list(groups.values())

    def resident_bytes(self) -> int:
        """Bytes the parameters take where they live."""
        return sum(parameters[0].untyped_storage().nbytes() for parameters in self._shared())

    def release(self, *, keep: bool) -> None:
        """Free the parameters' memory; with `keep`, copy to host memory first (on the CPU they stay in place)."""
        for parameters in self._shared():
            storage = parameters[0].untyped_storage()
            if keep and storage.device.type == "cpu":
                continue
            kept = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu() if keep else None
            views = tuple((each, each.shape, each.stride(), int(each.storage_offset())) for each in parameters)
            self._released.append(_Block(storage.nbytes(), storage.device, views, kept))
            for each in parameters:
                # Not a resize of the storage: that of a loaded checkpoint is a file in memory and cannot be resized.
                each.data = each.data.new_empty(0)

    def restore(self) -> None:
        """Allocate again and copy back what was kept; what was not is left undefined."""
        for block in self._released:
            memory = torch.empty(block.size_bytes, dtype=torch.uint8, device=block.device)
            if block.kept is not None:
                memory.copy_(block.kept)
            for parameter, shape, stride, offset in block.views:
                parameter.data = parameter.data.new_empty(0).set_(memory.untyped_storage(), offset, shape, stride)
        self._released = []
