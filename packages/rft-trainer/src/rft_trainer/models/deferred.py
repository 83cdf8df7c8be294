"""Causal models whose weights stay in their files until somebody says where they go.

The parameters are on the meta device and know their place in a safetensors file; buffers are real. A backend that cuts
a model into shards fills one block at a time, so that no process ever holds the whole model.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

_PLACE = "_rft_file_tensor"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a safetensors file."""

    file: Path
    key: str


class _EmptyOnMeta(TorchFunctionMode):
    """Uninitialised tensors, which layers make their weights of, are made on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every function."""
        options = dict(kwargs or {})
        if func is torch.empty and options.get("device") is None:
            options["device"] = "meta"
        return func(*args, **options)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built inside have meta parameters and real buffers."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        with _EmptyOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def deferred_causal_model(folder: Path, *, dtype: torch.dtype) -> Any | None:
    """The causal model of `folder` with its parameters on the meta device; None where that cannot be.

    It can where every parameter and persistent buffer is in the safetensors files under the model's own name and in its
    shape: not for quantised checkpoints, nor for those that transformers converts while it loads.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    files = _tensors_of(folder)
    config = AutoConfig.from_pretrained(folder)
    if not files or getattr(config, "quantization_config", None) is not None:
        return None
    make: Any = AutoModelForCausalLM.from_config
    with _parameters_on_meta():
        model: Any = make(config, dtype=dtype, attn_implementation="sdpa")
    # Older transformers (5.8) leaves the checkpoint's there.
    model.config.dtype = dtype
    kept = [getattr(model, name, None) for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")]
    if dtype is not torch.float32 and any(kept):
        return None
    try:
        if not _places_found(model, files) or not _buffers_read(model, files):
            return None
    except SafetensorError:
        return None  # transformers opens the file again and says what is wrong
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _tensors_of(folder: Path) -> dict[str, FileTensor]:
    """Key -> place, of all tensors of a checkpoint; empty where transformers would not read safetensors."""
    from safetensors import SafetensorError, safe_open

    index = folder / _INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        return {key: FileTensor(folder / name, key) for key, name in weight_map.items()}
    single = folder / _SINGLE
    if not single.is_file():
        return {}
    try:
        with safe_open(single, framework="pt") as opened:
            return {key: FileTensor(single, key) for key in opened.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError:
        return {}  # transformers opens it again and says what is wrong


def _places_found(model: nn.Module, files: dict[str, FileTensor]) -> bool:
    """Give each parameter its place; whether all have one, and only one where names are tied."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    places: dict[nn.Parameter, FileTensor] = {}
    for parameter, tied in names.items():
        found = [files[name] for name in tied if name in files]
        # Two entries for one tied weight may differ: transformers decides which one counts.
        if len(found) != 1:
            return False
        places[parameter] = found[0]
    with _Files() as opened:
        if any(opened.shape(place) != tuple(parameter.shape) for parameter, place in places.items()):
            return False
    for parameter, place in places.items():
        setattr(parameter, _PLACE, place)
    return True


@torch.no_grad()
def _buffers_read(model: nn.Module, files: dict[str, FileTensor]) -> bool:
    """Fill the persistent buffers; whether all are real and in the files."""
    persistent = model.state_dict(keep_vars=True)
    with _Files() as opened:
        for name, buffer in model.named_buffers():
            if buffer.is_meta or (name in persistent and name not in files):
                return False
            if name in persistent:
                buffer.copy_(opened.read(files[name]))
    return True


class _Files:
    """Safetensors files, each opened once."""

    def __enter__(self) -> "_Files":
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _file(self, file: Path) -> Any:
        from safetensors import safe_open

        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._opened[file]

    def shape(self, place: FileTensor) -> tuple[int, ...]:
        """Without reading the tensor."""
        return tuple(self._file(place.file).get_slice(place.key).get_shape())

    def read(self, place: FileTensor) -> Tensor:
        """The tensor; good while the files are open."""
        tensor: Tensor = self._file(place.file).get_tensor(place.key)
        return tensor


@torch.no_grad()
def settle(module: nn.Module, device: torch.device) -> None:
    """Bring what lies directly in `module` and the modules inside it to `device`; deferred weights from their files.

    Tied parameters stay tied. What is sharded already is left alone. No communication.
    """
    filled: dict[nn.Parameter, nn.Parameter] = {}
    with _Files() as files:
        for inner in module.modules():
            for name, parameter in inner._parameters.items():
                place: FileTensor | None = getattr(parameter, _PLACE, None)
                if parameter is None or isinstance(parameter, DTensor):
                    continue
                if place is None or not parameter.is_meta:
                    parameter.data = parameter.data.to(device)
                    continue
                if parameter not in filled:
                    data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    data.copy_(files.read(place))
                    filled[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                inner._parameters[name] = filled[parameter]
            _settle_buffers(inner, device)


def _settle_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and not isinstance(buffer, DTensor):
            module._buffers[name] = buffer.to(device)


@contextmanager
def placeholders(module: nn.Module) -> Iterator[None]:
    """Waiting parameters are CPU tensors of their shape and dtype inside, without memory to speak of or values.

    For code that looks at a parameter's device. `requires_grad` is kept from inside.
    """
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    places = [
        (inner, name, parameter)
        for inner in module.modules()
        for name, parameter in inner._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for inner, name, parameter in places:
        if parameter not in stand_ins:
            data = torch.empty((), dtype=parameter.dtype).expand(parameter.shape)
            stand_ins[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        inner._parameters[name] = stand_ins[parameter]
    try:
        yield
    finally:
        for inner, name, parameter in places:
            parameter.requires_grad_(stand_ins[parameter].requires_grad)
            inner._parameters[name] = parameter
