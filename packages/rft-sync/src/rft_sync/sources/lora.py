"""LoRA training: weights with the adapters merged in, or the adapter alone."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rft_sync.errors import UnsupportedCombination
from rft_sync.live import LiveTensor, inner_module, is_kind, unwrap
from rft_sync.sources.assembly import CheckpointSource, Combine, DtypePolicy, ExportTensor
from rft_sync.sources.whole import reshard

_MERGEABLE_VARIANTS = ("DoraLinearVariant",)


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters into `model`."""
    return any(is_kind(module, "BaseTunerLayer", "AuxiliaryTrainingWrapper", "PeftModel") for module in model.modules())


def _inner_peft(module: nn.Module) -> nn.Module | None:
    """As `inner_module`, through PEFT's wrappers too."""
    if is_kind(module, "PeftModel"):
        config = getattr(module, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedCombination(f"prompt learning ({config.peft_type}) and weight sync: train LoRA")  # type: ignore[union-attr]
        return module.base_model  # type: ignore[return-value]
    if is_kind(module, "BaseTuner"):
        return module.model  # type: ignore[return-value]
    if is_kind(module, "ModulesToSaveWrapper"):
        active = _active(module)
        if len(active) > 1:
            raise UnsupportedCombination(f"modules_to_save with several active adapters {active} and weight sync")
        copies: Any = module.modules_to_save
        return copies[active[0]] if active and active[0] in copies else module.original_module  # type: ignore[return-value]
    if is_kind(module, "AuxiliaryTrainingWrapper"):
        raise UnsupportedCombination(f"{type(module).__name__} (trainable tokens) and weight sync: use modules_to_save")
    return inner_module(module)


def _active(module: Any) -> list[str]:
    active = module.active_adapters if hasattr(module, "active_adapters") else module.active_adapter
    return [active] if isinstance(active, str) else list(active)


def _walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, Any]]:
    """`(prefix, module, LoRA layer around it or None)` for every module of the base model."""
    module = unwrap(module, _inner_peft)
    layer: Any = None
    if is_kind(module, "BaseTunerLayer"):
        if not is_kind(module, "LoraLayer"):
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise UnsupportedCombination(f"adapter {kind} ({prefix[:-1]}) and weight sync: train LoRA or full weights")
        layer, module = module, unwrap(module.base_layer, _inner_peft)  # type: ignore[arg-type]
    yield prefix, module, layer
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.")


def _adapters(layer: Any, prefix: str) -> list[str]:
    """Active adapters of a layer whose product is not in the base weight already."""
    if layer.disable_adapters:
        raise UnsupportedCombination(f"switched-off adapters ({prefix[:-1]}) and merged sync: leave disable_adapter()")
    known = set(layer.lora_A) | set(layer.lora_embedding_A)
    return [name for name in _active(layer) if name in known and name not in layer.merged_adapters]


def _factors(layer: Any, adapter: str, prefix: str) -> tuple[LiveTensor, LiveTensor]:
    if adapter in layer.lora_embedding_A:
        first = LiveTensor(f"{prefix}lora_embedding_A", layer.lora_embedding_A, adapter)
        return first, LiveTensor(f"{prefix}lora_embedding_B", layer.lora_embedding_B, adapter)
    first = LiveTensor(f"{prefix}lora_A.weight", layer.lora_A[adapter], "weight")
    return first, LiveTensor(f"{prefix}lora_B.weight", layer.lora_B[adapter], "weight")


def _is_dora(layer: Any, adapter: str, prefix: str) -> bool:
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None and type(variant).__name__ not in _MERGEABLE_VARIANTS:
        raise UnsupportedCombination(
            f"LoRA variant {type(variant).__name__} ({prefix[:-1]}) and merged sync: plain LoRA, or DoRA on "
            "linear layers, can be merged",
            [prefix[:-1]],
        )
    return variant is not None or bool(getattr(layer, "use_dora", {}).get(adapter, False))


def merged_weight(
    base: Tensor,
    factors: Sequence[tuple[Tensor, Tensor, float]],
    *,
    transposed: bool = False,
    magnitude: Tensor | None = None,
) -> Tensor:
    """`W + sum of s * B @ A` in fp32, out of place (LoRA, arXiv:2106.09685, eq. 3).

    Args:
        base: `[out, in, ...]`, or `[in, out]` when `transposed` (Conv1D layers and embeddings).
        factors: `(A [r, in, ...], B [out, r, ...], s)` per adapter.
        transposed: The layer stores its weight transposed.
        magnitude: `[out]`; DoRA scales each output row to this norm (arXiv:2402.09353, eq. 5).
    """
    merged = base.to(torch.float32, copy=True)
    for first, second, scale in factors:
        delta = second.to(torch.float32).flatten(1) @ first.to(torch.float32).flatten(1)
        merged += scale * (delta.T if transposed else delta.view(merged.shape))
    if magnitude is not None:
        rows = merged.T if transposed else merged
        factor = (magnitude.to(torch.float32).flatten() / torch.linalg.vector_norm(rows, dim=1)).unsqueeze(1)
        merged *= factor.T if transposed else factor
    return merged


def _merge_weight(prefix: str, base: LiveTensor, layer: Any, adapters: Sequence[str]) -> ExportTensor:
    kinds = ("Linear", "Embedding", "_ConvNd", "Conv1d", "Conv2d", "Conv3d")
    if not is_kind(layer, *kinds) or is_kind(layer, "ParamWrapper") or getattr(base.owner, "groups", 1) > 1:
        raise UnsupportedCombination(
            f"LoRA layer {type(layer).__name__} ({prefix[:-1]}) and merged sync: only linear, embedding and ungrouped "
            "convolution layers are merged",
            [base.name],
        )
    dora = [name for name in adapters if _is_dora(layer, name, prefix)]
    if dora and len(adapters) > 1:
        raise UnsupportedCombination(f"DoRA and several active adapters {list(adapters)} ({prefix[:-1]})", [base.name])
    parts = [base]
    for name in adapters:
        parts += _factors(layer, name, prefix)
    if dora:
        parts.append(LiveTensor(f"{prefix}lora_magnitude_vector", layer.lora_magnitude_vector[dora[0]], "weight"))
    transposed = bool(getattr(layer, "fan_in_fan_out", False)) or is_kind(layer, "Embedding")
    return ExportTensor(base.name, tuple(parts), _merger(layer, tuple(adapters), transposed, bool(dora)))


def _merger(layer: Any, adapters: tuple[str, ...], transposed: bool, dora: bool) -> Combine:
    def combine(tensors: Sequence[Tensor]) -> Tensor:
        count = len(adapters)
        factors = [
            (tensors[1 + 2 * index], tensors[2 + 2 * index], float(layer.scaling[name]))
            for index, name in enumerate(adapters)
        ]
        magnitude = tensors[1 + 2 * count] if dora else None
        return merged_weight(tensors[0], factors, transposed=transposed, magnitude=magnitude)

    return combine


def _merge_bias(prefix: str, base: LiveTensor, layer: Any, adapters: Sequence[str]) -> ExportTensor:
    """LoRA with a bias in B: `b + sum of s * b_B`."""
    biased = [name for name in adapters if getattr(layer, "lora_bias", {}).get(name)]
    if not biased:
        return ExportTensor(base.name, (base,))
    parts = [LiveTensor(f"{prefix}lora_B.bias", layer.lora_B[name], "bias") for name in biased]

    def combine(tensors: Sequence[Tensor]) -> Tensor:
        merged = tensors[0].to(torch.float32, copy=True)
        for name, bias in zip(biased, tensors[1:], strict=True):
            merged += float(layer.scaling[name]) * bias.to(torch.float32)
        return merged

    return ExportTensor(base.name, (base, *parts), combine)


def _export_weights(model: nn.Module, *, merged: bool) -> tuple[list[ExportTensor], list[str]]:
    """What is sent of the base model, with its adapters added or without, and the names that are left out."""
    found: list[ExportTensor] = []
    skipped: list[str] = []
    for prefix, module, layer in _walk(model):
        adapters = _adapters(layer, prefix) if layer is not None and merged else []
        if layer is not None and not merged and layer.merged_adapters:
            raise UnsupportedCombination(
                f"adapters merged in place ({prefix[:-1]}) and the weights below them: call unmerge_adapter() first"
            )
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            base = LiveTensor(prefix + name, module, name)
            if adapters and name == "weight":
                found.append(_merge_weight(prefix, base, layer, adapters))
            elif adapters and name == "bias":
                found.append(_merge_bias(prefix, base, layer, adapters))
            else:
                found.append(ExportTensor(base.name, (base,)))
        for name, buffer in module._buffers.items():
            if buffer is not None and name in module._non_persistent_buffers_set:
                skipped.append(prefix + name)
            elif buffer is not None:
                found.append(ExportTensor(prefix + name, (LiveTensor(prefix + name, module, name, buffer=True),)))
    return found, skipped


class MergedLoRASource(CheckpointSource):
    """A PEFT LoRA model as plain weights: `W + s * B @ A`, computed out of place in fp32 and rounded once.

    Works on plain, DDP, FSDP2 and DeepSpeed models. The base weights are only read, so they stay bit-equal over any
    number of updates. Active adapters are added up; rsLoRA, alpha and rank patterns and LoRA biases are followed,
    `modules_to_save` replaces the base module, DoRA on linear layers is merged.

    Args:
        model: A PEFT model, or a wrapper of one.
        dtype: Engine dtype, see `CheckpointSource`.
        keep_fp32: Names never cast.

    Raises:
        UnsupportedCombination: Other adapters or LoRA variants, by name; at construction.
    """

    def __init__(self, model: nn.Module, *, dtype: DtypePolicy = None, keep_fp32: Sequence[str] = ()) -> None:
        def exports() -> tuple[Sequence[ExportTensor], Sequence[str]]:
            reshard(model)
            return _export_weights(model, merged=True)

        exports()
        super().__init__(unwrap(model, _inner_peft), exports, dtype=dtype, keep_fp32=keep_fp32)


class BaseWeightsSource(CheckpointSource):
    """The weights below the adapters of a PEFT LoRA model, as if it had none: what an engine needs beside an adapter.

    Args:
        model: A PEFT model, or a wrapper of one.
        dtype: Engine dtype, see `CheckpointSource`.
        keep_fp32: Names never cast.

    Raises:
        UnsupportedCombination: Other adapters than LoRA, or adapters that were merged in place.
    """

    def __init__(self, model: nn.Module, *, dtype: DtypePolicy = None, keep_fp32: Sequence[str] = ()) -> None:
        def exports() -> tuple[Sequence[ExportTensor], Sequence[str]]:
            reshard(model)
            return _export_weights(model, merged=False)

        exports()
        super().__init__(unwrap(model, _inner_peft), exports, dtype=dtype, keep_fp32=keep_fp32)


class AdapterSource(CheckpointSource):
    """The factors A and B of one LoRA adapter under PEFT's file names, for engines that apply adapters themselves.

    The engine must hold the base weights: send those once in full, or let the engine keep them over its sleep.

    Args:
        model: A PEFT model, or a wrapper of one.
        adapter: Name of the adapter; the active one by default.
        dtype: Dtype in which the factors are sent; None keeps theirs.

    Raises:
        UnsupportedCombination: `modules_to_save`, DoRA, LoRA biases, or several active adapters.
    """

    kind = "adapter"

    def __init__(self, model: nn.Module, *, adapter: str | None = None, dtype: DtypePolicy = None) -> None:
        peft = unwrap(model)
        self._configs: Callable[[], Any] = lambda: getattr(peft, "peft_config", {})
        self._adapter = adapter or _only_adapter(peft)

        def exports() -> tuple[Sequence[ExportTensor], Sequence[str]]:
            reshard(model)
            return _export_factors(model, self._adapter), ()

        exports()
        super().__init__(nn.Module(), exports, dtype=dtype)

    def adapter_config(self) -> str:
        """The adapter's PEFT configuration as JSON."""
        config = self._configs()[self._adapter].to_dict()
        return json.dumps({key: _jsonable(value) for key, value in config.items()}, sort_keys=True)


def _jsonable(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


def _only_adapter(model: nn.Module) -> str:
    active = _active(model)
    if len(active) != 1:
        raise UnsupportedCombination(f"several active adapters {active} and AdapterSource: name one, or merge them")
    return active[0]


def _export_factors(model: nn.Module, adapter: str) -> list[ExportTensor]:
    found: list[ExportTensor] = []
    for name, module in model.named_modules():
        if is_kind(module, "ModulesToSaveWrapper"):
            raise UnsupportedCombination(
                f"modules_to_save ({name}) and adapter-only sync: use MergedLoRASource", [name]
            )
    for prefix, _, layer in _walk(model):
        if layer is None or adapter not in {*layer.lora_A, *layer.lora_embedding_A}:
            continue
        if _is_dora(layer, adapter, prefix) or getattr(layer, "lora_bias", {}).get(adapter):
            raise UnsupportedCombination(
                f"DoRA or a LoRA bias ({prefix[:-1]}) and adapter-only sync: use MergedLoRASource", [prefix[:-1]]
            )
        factors = _factors(layer, adapter, f"base_model.model.{prefix}")
        found += [ExportTensor(factor.name, (factor,)) for factor in factors]
    if not found:
        raise UnsupportedCombination(f"a model without adapter {adapter!r} and AdapterSource: use source_for(model)")
    return found
