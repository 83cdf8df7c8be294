"""Low-rank adapters."""

from dataclasses import dataclass
from typing import Literal

from rft_trainer.config.ranges import below
from rft_trainer.models.lora import ALL_LINEAR, AdapterConfig

LARGEST_VLLM_RANK = 512
"""vLLM applies no adapter of a larger rank."""


@dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """Low-rank adapters."""

    lora_rank: int = 0
    """Rank of the adapters that are trained instead of the weights; 0: full fine-tuning."""
    lora_alpha: float | None = None
    """Adapters are scaled by lora_alpha / lora_rank; none: twice the rank."""
    lora_targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the layers that get adapters, such as q_proj; all-linear: every linear layer but the output layer."""
    lora_sync: Literal["auto", "adapter", "merged"] = "auto"
    """What an update sends to the engine: adapter alone, or weights with it merged in; auto: the first to vllm."""
    separate_reference: bool = False
    """Load a second model as the reference instead of switching the actor's adapters off."""

    def _lora_problems(self) -> list[str]:
        problems = below(self, 0, "lora_rank")
        if self.lora_alpha is not None and self.lora_alpha <= 0:
            problems.append(f"lora_alpha is {self.lora_alpha}: give a number above 0")
        if not self.lora_targets:
            problems.append(f"lora_targets is empty: name layers, or give {ALL_LINEAR}")
        if ALL_LINEAR in self.lora_targets and len(self.lora_targets) > 1:
            problems.append(f"lora_targets is {list(self.lora_targets)}: give {ALL_LINEAR} alone, or names only")
        if self.lora_sync != "auto" and self.lora_rank == 0:
            problems.append(f"lora_sync is {self.lora_sync} and lora_rank is 0: there is no adapter; give a lora_rank")
        return problems

    def adapters(self, seed: int) -> AdapterConfig | None:
        """What the adapters are made from; None in full fine-tuning."""
        if self.lora_rank == 0:
            return None
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return AdapterConfig(rank=self.lora_rank, alpha=alpha, targets=self.lora_targets, seed=seed)
