"""From live names to checkpoint names, and from checkpoint names to another engine's names."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rft_sync.errors import UnsupportedCombination

Convert = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class NameUnit:
    """Live tensors that become checkpoint tensors together. `convert` is None where only the name changes."""

    live: tuple[str, ...]
    checkpoint: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    convert: Convert | None = None


def _reverse_mapping(model: nn.Module) -> Convert | None:
    """transformers' own mapping back to the checkpoint, for its models; None for all others."""
    if not any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 keeps checkpoint names in its modules
        return None

    def convert(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        # A fused tensor is split on its own: the mapping consumes the dictionary that it is given.
        return revert_weight_conversion(model, dict(tensors))  # type: ignore[no-any-return, arg-type]

    return convert


def _layer_of(name: str) -> str:
    """Prefix up to the last integer component: the scope inside which conversions work."""
    found = re.match(r"^(.*\.\d+)\.", name)
    return found.group(1) if found else ""


def _converted_unit(convert: Convert, members: Mapping[str, Tensor]) -> NameUnit:
    produced = convert(members)
    shapes = tuple(tuple(tensor.shape) for tensor in produced.values())
    return NameUnit(tuple(members), tuple(produced), shapes, convert)


def checkpoint_units(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> list[NameUnit]:
    """Group the live tensors of `model` (name -> global shape) into units with checkpoint names. No communication.

    Raises:
        UnsupportedCombination: The model's mapping cannot be undone piece by piece.
    """
    convert = _reverse_mapping(model)
    if convert is None:
        return [NameUnit((name,), (name,), (tuple(shape),)) for name, shape in shapes.items()]
    meta = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    whole = convert(meta)
    live_of = {id(tensor): name for name, tensor in meta.items()}
    units: dict[str, NameUnit] = {}
    for target, tensor in whole.items():
        source = live_of.get(id(tensor))
        if source is not None:
            units[source] = NameUnit((source,), (target,), (tuple(shapes[source]),))
    together: dict[str, dict[str, Tensor]] = {}
    for name in meta:
        if name in units:
            continue
        alone = _converted_unit(convert, {name: meta[name]})
        if all(whole.get(out) is not None and tuple(whole[out].shape) == shape for out, shape in _outputs(alone)):
            units[name] = alone
        else:  # several live tensors make one checkpoint tensor: convert the layer at once
            together.setdefault(_layer_of(name), {})[name] = meta[name]
    for members in together.values():
        units[next(iter(members))] = _converted_unit(convert, members)
    found = {out: shape for unit in units.values() for out, shape in _outputs(unit)}
    if found != {name: tuple(tensor.shape) for name, tensor in whole.items()}:
        wrong = sorted(set(found) ^ set(whole)) or sorted(n for n in found if tuple(whole[n].shape) != found[n])
        raise UnsupportedCombination(
            f"the checkpoint mapping of {type(model).__name__} and weight sync by bucket: {wrong} cannot be made from "
            "single layers",
            wrong,
        )
    return [units[name] for name in meta if name in units]


def _outputs(unit: NameUnit) -> Sequence[tuple[str, tuple[int, ...]]]:
    return tuple(zip(unit.checkpoint, unit.shapes, strict=True))


def fp32_patterns(model: nn.Module, dtype: torch.dtype | None) -> tuple[str, ...]:
    """Names that the model's own library keeps in fp32 when the model is held in `dtype`."""
    found: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        found.update(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        found.update(getattr(model, "_keep_in_fp32_modules", None) or ())
    return tuple(sorted(found))


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Whether `name` contains one of `patterns` (dotted names, `*` for any text) at component borders."""
    return any(
        re.search(rf"(^|\.){re.escape(pattern).replace(re.escape('*'), '.*')}($|\.)", name) for pattern in patterns
    )


class PrefixMap:
    """Checkpoint names -> an engine's names by prefix, longest prefix first; a name without a prefix stays as it is.

    >>> PrefixMap({"model.visual.": "visual.", "model.": "language_model.model."})("model.norm.weight")
    'language_model.model.norm.weight'
    """

    def __init__(self, prefixes: Mapping[str, str]) -> None:
        self.prefixes = dict(sorted(prefixes.items(), key=lambda pair: -len(pair[0])))

    def __call__(self, name: str) -> str:
        """The engine's name."""
        for prefix, replacement in self.prefixes.items():
            if name.startswith(prefix):
                return replacement + name[len(prefix) :]
        return name
