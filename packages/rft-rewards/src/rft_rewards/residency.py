"""Who is on the device: reward models take turns."""

import threading
from typing import Any, Protocol


class ModelResidency(Protocol):
    """Brings a module to its device and takes it away again; a trainer may pass its own."""

    def acquire(self, module: Any) -> None:
        """Bring `module` to the device; called before it scores."""

    def release(self, module: Any) -> None:
        """Take `module` off the device; called after it scored, also after a failure."""


class DeviceTurn:
    """At most one of the modules that share this object is on the device: the peak is the largest, not the sum.

    Attributes:
        resident: modules on the device now, 0 or 1.
        peak_resident: the most that ever were.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.resident = 0
        self.peak_resident = 0
        self._turn = threading.Lock()

    def acquire(self, module: Any) -> None:
        """Wait until no other module is resident, then move `module` to the device."""
        self._turn.acquire()
        self.resident += 1
        self.peak_resident = max(self.peak_resident, self.resident)
        try:
            module.to(self.device)
        except BaseException:
            self.release(module)
            raise

    def release(self, module: Any) -> None:
        """Move `module` to the CPU and let the next one in."""
        import torch

        try:
            module.to("cpu")
            if torch.device(self.device).type == "cuda":
                torch.cuda.empty_cache()  # else the next model finds the freed blocks only if they happen to fit
        finally:
            self.resident -= 1
            self._turn.release()
