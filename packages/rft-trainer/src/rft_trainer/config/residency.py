"""What leaves the device while it is not used."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ResidencyOptions:
    """What leaves the device while it is not used."""

    offload_trained: bool = False
    """Move actor, critic and their optimisers to the host while the engine generates."""
    offload_frozen: bool = False
    """Keep each frozen model on the host outside the phase in which it scores."""
