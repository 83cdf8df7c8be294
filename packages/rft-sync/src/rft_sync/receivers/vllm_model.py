"""What a vLLM model is made of, told from its modules without importing vLLM."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from rft_sync.errors import ShapeMismatch
from rft_sync.live import is_kind
from rft_sync.manifest import Manifest

_VOCABULARY_NAMES = ("embed_tokens.weight", "lm_head.weight", "wte.weight")


def check_vocabulary(manifest: Manifest, rows: int) -> None:
    """The embeddings that are sent have the `rows` of the engine's vocabulary.

    Raises:
        ShapeMismatch: With the numbers.
    """
    for meta in manifest.metadata:
        if meta.name.endswith(_VOCABULARY_NAMES) and meta.shape[0] != rows:
            raise ShapeMismatch(
                f"{meta.name} has {meta.shape[0]} rows and the engine's vocabulary {rows}; start the engine from a "
                "checkpoint of the resized model",
                [meta.name],
            )


def struct_fields(struct: Any) -> Sequence[str]:
    """Field names of a msgspec struct or a dataclass."""
    return getattr(struct, "__struct_fields__", None) or tuple(getattr(struct, "__dataclass_fields__", ()))


def fills_live_layout(model: nn.Module, config: Any) -> bool:
    """Whether the loader may write into the live parameters: unquantised, not repacked, nothing derived from them."""
    if getattr(config.model_config, "quantization", None) is not None:
        return False
    if any(parameter.numel() == 0 or parameter.is_meta for parameter in model.parameters()):
        return False
    derived = any(_is_derived(module) for module in model.modules())
    return not derived and all(parameter.device.type != "cpu" for parameter in model.parameters())


def _is_derived(module: nn.Module) -> bool:
    """Whether the layer's kernels read something else than what its loader fills: experts, absorbed attention."""
    method = type(getattr(module, "quant_method", None)).__name__
    experts = any(name in kind for kind in (method, type(module).__name__) for name in ("FusedMoE", "RoutedExperts"))
    stacked = any(name.startswith(("w13_", "w2_")) for name in module._parameters)
    return experts or stacked or hasattr(module, "W_UK_T") or hasattr(module, "W_UV")


def reset_lora_state(worker: Any) -> None:
    """Forget what a worker's LoRA layers derived from their base weights."""
    reset: Callable[[], None] | None = getattr(getattr(worker, "model_runner", None), "reset_lora_state", None)
    if reset is not None:
        reset()


@contextmanager
def without_lora_wrappers(model: nn.Module) -> Iterator[None]:
    """Put the base layers in place of vLLM's LoRA wrappers, so that the loader finds its own names."""
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and is_kind(child, "BaseLayerWithLoRA"):
                swapped.append((parent, name, child))
                parent._modules[name] = child.base_layer  # type: ignore[assignment]
    try:
        yield
    finally:
        for parent, name, child in swapped:
            parent._modules[name] = child
