"""Which source fits a model."""

from collections.abc import Sequence

from torch import nn

from rft_sync.errors import UnsupportedCombination
from rft_sync.live import is_kind, unwrap
from rft_sync.sources.assembly import CheckpointSource, DtypePolicy
from rft_sync.sources.lora import MergedLoRASource, has_adapters
from rft_sync.sources.whole import FSDPSource, ModuleSource, ZeroSource


def source_for(model: nn.Module, *, dtype: DtypePolicy = None, keep_fp32: Sequence[str] = ()) -> CheckpointSource:
    """The source for `model`: a plain module, DDP, FSDP2, a DeepSpeed engine of any ZeRO stage, or PEFT LoRA on these.

    Args:
        model: The model as the trainer holds it, wrappers included.
        dtype: Engine dtype for floating-point tensors, one or by checkpoint name; None keeps the live dtypes.
        keep_fp32: Names never cast.

    Raises:
        UnsupportedCombination: FSDP1, pipeline engines, meta or quantised parameters, other adapters than LoRA.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedCombination(
            f"{type(model).__name__} and source_for: give a torch module, or write a ParameterSource (metadata, gather)"
        )
    inner = unwrap(model)
    if has_adapters(inner):
        return MergedLoRASource(model, dtype=dtype, keep_fp32=keep_fp32)
    if any(hasattr(parameter, "ds_id") for parameter in inner.parameters()):
        return ZeroSource(model, dtype=dtype, keep_fp32=keep_fp32)
    sharded_modules = any(is_kind(module, "FSDPModule") for module in inner.modules())
    if sharded_modules or any(type(parameter).__name__ == "DTensor" for parameter in inner.parameters()):
        return FSDPSource(model, dtype=dtype, keep_fp32=keep_fp32)
    if is_kind(model, "DeepSpeedEngine"):
        return ZeroSource(model, dtype=dtype, keep_fp32=keep_fp32)
    return ModuleSource(model, dtype=dtype, keep_fp32=keep_fp32)
