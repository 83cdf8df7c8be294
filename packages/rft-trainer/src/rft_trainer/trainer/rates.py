"""Rates of a step: what was done, over the seconds that it took."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rft_trainer.experience.dynamic import SAMPLED_TOKENS

TOKENS = "rollout/tokens"
PEAK_BF16_FLOPS = {"A100": 312e12, "H100 80GB HBM3": 989.4e12, "H200": 989.4e12}
"""Dense bf16 operations per second by a part of the device's name, as its maker states them."""


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 operations per second of a device; None for one that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16_FLOPS.items() if part in name), None)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates under `perf/`.

    parameters, peak_flops: for the model FLOP utilisation of the update; None of either leaves it undefined.
    """

    world_size: int
    epochs: int
    parameters: int | None = None
    peak_flops: float | None = None

    def of(self, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
        """Rates from a step's reduced metrics and its seconds by phase.

        The utilisation counts 6 operations for each weight and token of each epoch (Kaplan et al. 2020): forward and
        backward, without attention and without what recomputation adds.
        """
        responses, tokens = metrics["rollout/responses"], metrics[TOKENS]
        rates = {
            "perf/samples_per_second": responses / seconds["step"],
            "perf/tokens_per_second": tokens / seconds["step"],
            "perf/tokens_per_second_per_rank": tokens / seconds["step"] / self.world_size,
        }
        # With dynamic sampling more is generated than the responses that are left.
        sampled = metrics.get(SAMPLED_TOKENS, metrics["rollout/response_length"] * responses if responses else 0.0)
        if "generate" in seconds and sampled:
            rates["perf/generated_tokens_per_second"] = sampled / seconds["generate"]
        if self.parameters is not None and self.peak_flops is not None and seconds.get("update"):
            work = 6.0 * self.parameters * tokens * self.epochs
            rates["perf/update_mfu"] = work / seconds["update"] / (self.peak_flops * self.world_size)
        return rates
