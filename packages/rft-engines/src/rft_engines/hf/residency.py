"""Where the parameters of a sleeping module are."""

import torch
from torch import Tensor, nn


class ParameterStorage:
    """Frees and brings back the memory of a module's parameters without changing their identity.

    Parameters that share memory (tied embeddings) are freed once and share again afterwards. Buffers stay: they are
    small, and a weight update does not send those that no checkpoint holds.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._host_copies: dict[int, Tensor] | None = None
        self._sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def _storages(self) -> dict[int, torch.UntypedStorage]:
        storages = [parameter.untyped_storage() for parameter in self._model.parameters()]
        return {storage._cdata: storage for storage in storages}

    def resident_bytes(self) -> int:
        """Bytes the parameters take where they live."""
        return sum(storage.nbytes() for storage in self._storages().values())

    def release(self, *, keep: bool) -> None:
        """Free the parameters' memory; with `keep`, copy to host memory first (on the CPU they stay in place)."""
        storages = self._storages()
        if keep and all(storage.device.type == "cpu" for storage in storages.values()):
            return
        self._host_copies = {}
        for key, storage in storages.items():
            if keep:
                flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                self._host_copies[key] = flat.cpu()
            self._sizes[key] = (storage, storage.nbytes())
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate again and copy back what was kept; what was not is left undefined."""
        if self._host_copies is None:
            return
        for key, (storage, size) in self._sizes.items():
            storage.resize_(size)
            kept = self._host_copies.get(key)
            if kept is not None:
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(kept)
        self._host_copies = None
        self._sizes = {}
