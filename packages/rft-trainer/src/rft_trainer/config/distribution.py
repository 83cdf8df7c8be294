"""How the work is spread, and in which precision."""

from dataclasses import dataclass
from typing import Literal

Precision = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class DistributionOptions:
    """How the work is spread, and in which precision."""

    fsdp: bool = False
    """FSDP2 instead of DeepSpeed ZeRO."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """ZeRO stage when DeepSpeed is used."""
    precision: Precision = "auto"
    """auto: bf16 compute with fp32 masters on a GPU, fp32 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes the GPU when there is one."""
    collective_timeout_seconds: float = 1800.0
    """A collective that takes longer ends the job."""
    collective_guard: bool = False
    """Check every rank's collectives against each other and name the rank that diverges."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward."""


def computes_in_bf16(config: DistributionOptions, device_type: str) -> bool:
    """Whether a device of this type computes in bfloat16."""
    return config.precision == "bf16" or (config.precision == "auto" and device_type == "cuda")
