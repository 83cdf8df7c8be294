"""A LoRA adapter applied in the forward passes of a plain torch module."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rft_sync.errors import ShapeMismatch, UnknownTensor, UnsupportedCombination
from rft_sync.manifest import Manifest
from rft_sync.parameters import Bucket, ParamMeta

_PREFIX = "base_model.model."
_FIRST, _SECOND = ".lora_A.weight", ".lora_B.weight"


class LayerAdapter:
    """`y + s * B @ (A @ x)` behind linear layers of `module` (LoRA, arXiv:2106.09685, eq. 3), by forward hooks.

    Parameters and buffers of the module stay what they are. The factors lie beside each layer's weight, in its dtype;
    an update writes them in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._factors: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        self._layers: dict[str, nn.Linear] = {}
        self._scales: dict[str, float] = {}

    @property
    def factors(self) -> Mapping[str, Tensor]:
        """Name as sent -> live factor; empty without an adapter."""
        return self._factors

    def check(self, manifest: Manifest) -> None:
        """Find the layers that `manifest` adapts; nothing is changed.

        Raises:
            UnknownTensor: A factor of no layer, or one without its other half.
            ShapeMismatch: Factors that do not fit their layer.
            UnsupportedCombination: Layers that are not linear, or ranks and scales by pattern.
        """
        config = json.loads(manifest.adapter_config or "{}")
        patterned = [key for key in ("rank_pattern", "alpha_pattern") if config.get(key)]
        if patterned:
            raise UnsupportedCombination(
                f"{' and '.join(patterned)} and an adapter in a torch module: merge it (MergedLoRASource)"
            )
        sent = {meta.name: meta for meta in manifest.metadata}
        self._layers, self._scales = {}, {}
        for prefix in _layer_names(sent):
            rank = self._check_layer(prefix, sent)
            alpha = float(config.get("lora_alpha", rank))
            self._scales[prefix] = alpha / (rank**0.5 if config.get("use_rslora") else rank)

    def _check_layer(self, prefix: str, sent: Mapping[str, ParamMeta]) -> int:
        """The rank of one layer's factors."""
        pair = [prefix + _FIRST, prefix + _SECOND]
        absent = [name for name in pair if name not in sent]
        if absent:
            raise UnknownTensor(f"an adapter comes without {absent}", absent)
        try:
            layer = self._module.get_submodule(prefix.removeprefix(_PREFIX))
        except AttributeError as error:
            raise UnknownTensor(f"the receiving module has no layer for {pair}", pair) from error
        if not isinstance(layer, nn.Linear):
            raise UnsupportedCombination(
                f"an adapter on {type(layer).__name__} ({prefix.removeprefix(_PREFIX)}) and ModuleReceiver: only "
                "linear layers take one; merge it (MergedLoRASource)"
            )
        first, second = (sent[name].shape for name in pair)
        wanted = (first[0], layer.in_features), (layer.out_features, first[0])
        if (first, second) != wanted:
            raise ShapeMismatch(f"{pair} are {first} and {second} at the source; the layer takes {wanted}", pair)
        self._layers[prefix] = layer
        return int(first[0])

    @torch.no_grad()
    def load(self, bucket: Bucket) -> None:
        """Write the bucket's factors; the layers use them from the next forward pass on, when both halves are there."""
        for name, tensor in bucket:
            weight = self._layers[_layer_of(name)].weight
            live = self._factors.get(name)
            if live is None or live.shape != tensor.shape or (live.dtype, live.device) != (weight.dtype, weight.device):
                self._factors[name] = live = torch.empty(tensor.shape, dtype=weight.dtype, device=weight.device)
            live.copy_(tensor)

    def apply(self) -> None:
        """Let the layers that were checked use their factors, and no other."""
        self._unhook()
        sent = {prefix + suffix for prefix in self._layers for suffix in (_FIRST, _SECOND)}
        self._factors = {name: factor for name, factor in self._factors.items() if name in sent}
        for prefix, layer in self._layers.items():
            self._hooks.append(layer.register_forward_hook(self._hook(prefix)))

    def _hook(self, prefix: str) -> Any:
        first, second, scale = self._factors[prefix + _FIRST], self._factors[prefix + _SECOND], self._scales[prefix]

        def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output + scale * F.linear(F.linear(inputs[0], first), second)

        return add

    def drop(self) -> None:
        """The module without an adapter again."""
        self._unhook()
        self._factors = {}

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _layer_of(name: str) -> str:
    return name.removesuffix(_FIRST).removesuffix(_SECOND)


def _layer_names(sent: Sequence[str] | Mapping[str, Any]) -> Iterator[str]:
    """Layers in the order sent, each once.

    Raises:
        UnknownTensor: A name that is no factor of a linear layer.
    """
    wrong = [name for name in sent if not name.endswith((_FIRST, _SECOND)) or not name.startswith(_PREFIX)]
    if wrong:
        raise UnknownTensor(f"{wrong} are no factors of linear layers; merge the adapter (MergedLoRASource)", wrong)
    yield from dict.fromkeys(_layer_of(name) for name in sent)
