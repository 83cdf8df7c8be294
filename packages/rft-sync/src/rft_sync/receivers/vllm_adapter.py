"""The adapter of an in-process vLLM: loaded under one name, and found again in the layers that apply it."""

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rft_sync.errors import EngineRefused, VerificationFailed
from rft_sync.live import is_kind
from rft_sync.manifest import Manifest
from rft_sync.receivers.vllm_model import struct_fields
from rft_sync.scan import Piece

_ADAPTER_ID = 1
_PREFIX = "base_model.model."
_FIRST, _SECOND = ".lora_A.weight", ".lora_B.weight"


Part = tuple[int, int | None]
WHOLE: Part = (0, None)


@dataclass(frozen=True, slots=True)
class FactorSlot:
    """Where one factor of an adapter lies in a layer of vLLM: one slice of a buffer that all adapters share.

    Attributes:
        buffer: `[adapters, 1, rows, columns]`; a smaller factor lies in the first corner, with zeros around it.
        rows: First row of the sent factor that this rank keeps, and the first behind it that it does not.
        columns: As `rows`.
    """

    buffer: Tensor
    rows: Part = WHOLE
    columns: Part = WHOLE

    def filled(self, factor: Tensor, scale: float) -> Tensor:
        """What the slot holds, `[rows, columns]` in the engine's dtype, once `factor` was multiplied by `scale`."""
        kept = factor[slice(*self.rows), slice(*self.columns)].to(self.buffer.dtype)
        whole = torch.zeros(self.buffer.shape[2:], dtype=self.buffer.dtype, device=factor.device)
        # In fp32 and rounded once, as a kernel does it whatever the dtype.
        whole[: kept.shape[0], : kept.shape[1]] = kept if scale == 1 else kept.float() * scale
        return whole


def factor_slots(
    layers: Mapping[str, Any], packed: Mapping[str, Sequence[str]]
) -> dict[str, tuple[FactorSlot, FactorSlot]]:
    """Checkpoint name of a layer -> the slots of its factors A and B on this rank.

    Layers of other kinds than vLLM's linear ones, and layers whose factors A are cut too, are left out.

    Args:
        layers: Name in the engine -> vLLM's LoRA layer.
        packed: Name of a fused layer -> names of the layers that it is fused of, in their order.
    """
    found: dict[str, tuple[FactorSlot, FactorSlot]] = {}
    for name, layer in layers.items():
        parts = packed.get(name) or [name]
        if not _is_known(layer) or len(parts) != len(layer.lora_a_stacked):
            continue
        for place, part in enumerate(parts):
            columns, rows = _kept(layer, place)
            first, second = layer.lora_a_stacked[place], layer.lora_b_stacked[place]
            found[part] = (FactorSlot(first, columns=columns), FactorSlot(second, rows=rows))
    return found


def _is_known(layer: Any) -> bool:
    if is_kind(layer, "RowParallelLinearWithLoRA", "ColumnParallelLinearWithLoRA"):
        cut = getattr(getattr(layer, "lora_config", None), "fully_sharded_loras", False)
        # One factor for a fused layer is cut in several places.
        fused = getattr(layer, "is_merged_col_linear", False) or is_kind(layer, "QKVParallelLinearWithLoRA")
        return layer.tp_size == 1 or not (cut or (fused and len(layer.lora_a_stacked) == 1))
    return is_kind(layer, "ReplicatedLinearWithLoRA")


def _kept(layer: Any, place: int) -> tuple[Part, Part]:
    """What a rank keeps: columns of A and rows of B."""
    if layer.tp_size == 1:
        return WHOLE, WHOLE
    if is_kind(layer, "RowParallelLinearWithLoRA"):
        return _part(layer.input_size, layer.tp_rank), WHOLE
    if is_kind(layer, "MergedColumnParallelLinearWithLoRA"):
        # Ranks beyond the number of key-value heads share one of them.
        return WHOLE, _part(layer.output_slices[place], layer.output_ids[place])
    if is_kind(layer, "ColumnParallelLinearWithLoRA"):
        return WHOLE, _part(layer.output_size, layer.tp_rank)
    return WHOLE, WHOLE


def _part(size: int, number: int) -> Part:
    return size * number, size * (number + 1)


def scaling(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """`alpha / r`, or `alpha / sqrt(r)` with rsLoRA (arXiv:2312.03732), as PEFT's configuration has it for `layer`."""
    alpha = float(config.get("lora_alpha", rank))
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            alpha = float(value)
            break
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


class EngineAdapter:
    """The one adapter that an engine generates with.

    Attributes:
        request: To generate with; None without an adapter.
    """

    def __init__(self) -> None:
        self.request: Any = None
        self._factors: dict[str, Tensor] = {}
        self._slots: dict[str, FactorSlot] = {}
        self._scales: dict[str, float] = {}
        self._manager: Any = None

    def begin(self, model: nn.Module, manifest: Manifest) -> None:
        """Find the layers of `model` that will apply what `manifest` lists."""
        self._factors, self._slots, self._scales = {}, {}, {}
        self._manager = getattr(model, "lora_manager", None)
        if self._manager is None:
            return
        config = json.loads(manifest.adapter_config or "{}")
        found = factor_slots(self._manager.modules, self._manager.packed_modules)
        mapped = _engine_names(model, manifest.names)
        for meta in manifest.metadata:
            layer = mapped.get(meta.name)
            if layer not in found:
                continue
            is_second = meta.name.endswith(_SECOND)
            self._slots[meta.name] = found[layer][is_second]
            # vLLM folds the scale into B.
            own = meta.name.removeprefix(_PREFIX).removesuffix(_SECOND)
            self._scales[meta.name] = scaling(config, own, meta.shape[1]) if is_second else 1.0

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep copies on the host."""
        self._factors.update({name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()})

    def forget(self) -> None:
        """Forget what was taken and not applied."""
        self._factors = {}

    def apply(
        self,
        engine: Any,
        manifest: Manifest,
        request: Callable[..., Any],
        save: Callable[[dict[str, Tensor], str], object],
    ) -> None:
        """Write PEFT files to memory-backed storage and load them in place under the one name.

        Args:
            engine: vLLM's engine.
            manifest: What was sent.
            request: vLLM's `LoRARequest`.
            save: Writes tensors to a file of that name, as safetensors.

        Raises:
            EngineRefused: vLLM did not take them.
        """
        shared = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
            save(self._factors, str(Path(folder) / "adapter_model.safetensors"))
            (Path(folder) / "adapter_config.json").write_text(manifest.adapter_config or "{}")
            fields = {"lora_name": "policy", "lora_int_id": _ADAPTER_ID, "lora_path": folder}
            if self.request is not None and "load_inplace" not in struct_fields(request):
                engine.remove_lora(_ADAPTER_ID)
            inplace = {"load_inplace": True} if "load_inplace" in struct_fields(request) else {}
            if not engine.add_lora(request(**fields, **inplace)):
                rank = json.loads(manifest.adapter_config or "{}").get("r")
                raise EngineRefused(f"vLLM did not take the adapter (rank {rank}); check max_lora_rank and max_loras")
        # The adapter stays loaded under its id; a request that reloads would look for the folder.
        self.request = request(**fields)
        self._factors = {}

    def drop(self, engine: Any) -> None:
        """Full weights end the life of an adapter: it belongs to the base weights that it was trained on."""
        if self.request is not None:
            engine.remove_lora(_ADAPTER_ID)
            self.request = None
        self._slots = {}

    @property
    def places(self) -> Mapping[str, FactorSlot]:
        """Name of a sent factor -> its slot, for those whose place in the engine is known."""
        return self._slots

    def expected(self, name: str, factor: Tensor) -> Sequence[Piece]:
        """What the slot of the sent `factor` holds on this rank once it is loaded."""
        slot = self._slots[name]
        return [Piece(slot.filled(factor, self._scales[name]), slot.buffer.dtype)]

    def read_back(self, name: str) -> Sequence[Tensor]:
        """The live slot.

        Raises:
            VerificationFailed: vLLM has the adapter in no slot, so it would generate without.
        """
        places: list[int | None] = self._manager.lora_index_to_id
        if _ADAPTER_ID not in places:
            raise VerificationFailed(f"vLLM took the adapter and has it in none of its slots {places}", [name])
        return [self._slots[name].buffer[places.index(_ADAPTER_ID), 0]]


def _engine_names(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Factor as sent -> name of its layer in the engine; factors of other layers than linear ones are left out."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    if hasattr(mapper, "get_rename_mapper"):  # a mapper may fuse weights as well, which adapters are not
        mapper = mapper.get_rename_mapper()
    found: dict[str, str] = {}
    for name in names:
        if not name.startswith(_PREFIX) or not name.endswith((_FIRST, _SECOND)):
            continue
        own = name.removeprefix(_PREFIX)
        # vLLM maps the names of weights, not of layers.
        mapped = own if mapper is None else mapper._map_name(own)
        if mapped is not None:
            found[name] = mapped.removesuffix(_FIRST).removesuffix(_SECOND)
    return found
