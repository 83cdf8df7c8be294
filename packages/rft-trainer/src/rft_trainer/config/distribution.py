"""How the work is spread, and in which precision."""

from dataclasses import dataclass
from typing import Literal

from rft_trainer.config.ranges import below

Precision = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class DistributionOptions:
    """How the work is spread, and in which precision."""

    fsdp: bool = False
    """FSDP2 instead of DeepSpeed ZeRO."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """ZeRO stage when DeepSpeed is used."""
    fsdp_shard_size: int | None = None
    """FSDP2: ranks that share one copy of the parameters; other groups hold further copies (HSDP). None: all."""
    fsdp_reshard: bool = True
    """FSDP2: give a block's gathered weights back after its forward; off: keep them for backward, faster and larger."""
    fsdp_cpu_offload: bool = False
    """FSDP2: trained parameters, gradients and optimiser live on the host, by CPUOffloadPolicy, and stay there."""
    zero_hpz_size: int = 1
    """ZeRO-3: ranks of the secondary partition that backward gathers from (ZeRO++ hpZ); 1: none."""
    zero_overlap: bool | None = None
    """ZeRO: reduce gradients while backward computes; none: on a GPU."""
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

    def _distribution_problems(self) -> list[str]:
        return below(self, 1, "fsdp_shard_size", "zero_hpz_size")


def computes_in_bf16(config: DistributionOptions, device_type: str) -> bool:
    """Whether a device of this type computes in bfloat16."""
    return config.precision == "bf16" or (config.precision == "auto" and device_type == "cuda")
