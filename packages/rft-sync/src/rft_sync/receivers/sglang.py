"""SGLang: a raw `sglang.Engine`, whose schedulers are processes of their own."""

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rft_sync.errors import EngineNotReady, EngineRefused, UnsupportedCombination
from rft_sync.manifest import Manifest
from rft_sync.parameters import Bucket
from rft_sync.receivers.protocol import UpdateSession
from rft_sync.scan import Piece

_ADAPTER_NAME = "policy"
_HELD_BUCKETS = 2


class SGLangReceiver:
    """Sends buckets into a `sglang.Engine`, one flattened payload each, inside an update session where there is one.

    Only the rank that owns an engine (the leader of its tensor-parallel group) gives one; the other ranks give None
    and only take part in the gathers. SGLang reports refusals by return value; every one is checked. A payload is
    kept until the second next one was answered, because an answer can come before the engine's copy is done.

    Args:
        engine: `sglang.Engine`, or None on a rank without one. The package is not imported before the first bucket.
        flush: Flush the cache after an update. Switch off where the owner of the engine does so, and while the KV
            cache is released (releasing it has emptied it).
        read_rows: Rows of each tensor that verification reads back.

    Attributes:
        session: Version and usability.
        lora_name: Name to generate with after an adapter-only update; None again after a full one.
    """

    def __init__(self, engine: Any | None, *, flush: bool = True, read_rows: int = 16) -> None:
        self._engine = engine
        self.flush = flush
        self._read_rows = read_rows
        self.session = UpdateSession("SGLangReceiver")
        self.lora_name: str | None = None
        self._open = False
        self._held: deque[object] = deque(maxlen=_HELD_BUCKETS)
        self._adapter: dict[str, Tensor] = {}
        self._noted: dict[str, tuple[torch.dtype, torch.device]] = {}

    def dtype_policy(self) -> torch.dtype | None:
        """The engine's dtype where its arguments name one; None keeps the trainer's, and the engine casts."""
        named = getattr(getattr(self._engine, "server_args", None), "dtype", None)
        found = getattr(torch, str(named), None)
        return found if isinstance(found, torch.dtype) else None

    @property
    def adapter(self) -> str | None:
        """What an engine object generates with after the last update: `lora_name`."""
        return self.lora_name

    @property
    def _tp_size(self) -> int:
        return int(getattr(getattr(self._engine, "server_args", None), "tp_size", 1))

    def start(self, manifest: Manifest) -> None:
        """Check that the engine is idle; nothing is written.

        Raises:
            EngineNotReady: Requests are running, an update is open, or the engine does not answer.
            UnsupportedCombination: An adapter for an engine that cannot load one from memory.
        """
        self.session.require_full(manifest)
        takes_adapters = self._engine is None or hasattr(self._engine, "load_lora_adapter_from_tensors")
        if manifest.kind == "adapter" and not takes_adapters:
            raise UnsupportedCombination("adapter-only sync and a SGLang without load_lora_adapter_from_tensors")
        if self.flush and self._engine is not None and not self._idle():
            raise EngineNotReady("SGLang does not flush its cache: requests are running; finish or abort them first")
        self.session.open(manifest)
        self._adapter, self._noted = {}, {}

    def _idle(self) -> bool:
        """SGLang flushes its cache only while nothing runs."""
        try:
            return _accepted(self._engine.flush_cache())[0]  # type: ignore[union-attr]
        except Exception as error:
            raise EngineNotReady(
                f"the SGLang engine does not answer ({type(error).__name__}: {error}); create a new one, connect again"
            ) from error

    def load(self, bucket: Bucket) -> None:
        """Send one bucket.

        Raises:
            EngineRefused: The engine answered that it did not take it.
        """
        manifest = self.session.manifest
        self.session.count(bucket.names)
        assert manifest is not None  # count refuses buckets outside an update
        if self._engine is None:
            return
        if manifest.kind == "adapter":
            self._adapter.update({name: tensor.detach().clone() for name, tensor in bucket})
            return
        if not self._open:
            self._begin()
        payload, options = self._payload(bucket)
        self._held.append(payload)
        self._call("update_weights_from_tensor", payload, flush_cache=False, **options)
        if any(tensor.is_cuda for _, tensor in bucket):
            torch.cuda.synchronize()

    def _begin(self) -> None:
        """Newer releases take weights inside a session only, and say so by a return value."""
        self._open = True
        if hasattr(self._engine, "begin_weight_update"):
            self._call("begin_weight_update")

    def _payload(self, bucket: Bucket) -> tuple[list[Any], dict[str, Any]]:
        """A copy of the bucket in the form that the engine's process reads."""
        pairs = [(name, tensor.detach()) for name, tensor in bucket]
        try:
            from sglang.srt.utils import MultiprocessingSerializer
            from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
        except ImportError:  # a release that has them elsewhere, or an engine of the same form without the package
            return [(name, tensor.clone()) for name, tensor in pairs], {}
        if any(tensor.is_cuda for _, tensor in pairs):
            _share_by_device_identity()
        flattened = FlattenedTensorBucket(named_tensors=pairs)
        content = {"flattened_tensor": flattened.get_flattened_tensor(), "metadata": flattened.get_metadata()}
        # One payload per tensor-parallel rank: each reads its own, so that no handle is opened twice.
        serialised = [MultiprocessingSerializer.serialize(content) for _ in range(self._tp_size)]
        self._held.append(content)
        return serialised, {"load_format": "flattened_bucket"}

    def _call(self, name: str, *args: Any, **options: Any) -> None:
        method: Callable[..., Any] = getattr(self._engine, name)
        try:
            accepted, message = _accepted(method(*args, **options))
        except Exception as error:
            raise EngineRefused(f"sglang.Engine.{name} failed: {type(error).__name__}: {error}") from error
        if not accepted:
            raise EngineRefused(f"sglang.Engine.{name} was refused: {message}")

    def finish(self, version: int) -> None:
        """Close the engine's session, flush its cache.

        Raises:
            EngineRefused: Any of it was refused.
        """
        self.session.check_complete()
        manifest = self.session.manifest
        assert manifest is not None  # check_complete refuses otherwise
        if self._engine is not None:
            if manifest.kind == "adapter":
                self._apply_adapter(manifest)
            else:
                if self._open and hasattr(self._engine, "end_weight_update"):
                    self._call("end_weight_update")
                self._drop_adapter()
            self._open = False
            if self.flush:
                self._call("flush_cache")
        self._held.clear()
        self.session.close(version)

    def _apply_adapter(self, manifest: Manifest) -> None:
        self._drop_adapter()  # a name that exists is refused
        config = json.loads(manifest.adapter_config or "{}")
        self._call("load_lora_adapter_from_tensors", _ADAPTER_NAME, self._adapter, config)
        self.lora_name, self._adapter = _ADAPTER_NAME, {}

    def _drop_adapter(self) -> None:
        """Full weights or the next adapter end the life of the last one."""
        if self.lora_name is not None:
            self._call("unload_lora_adapter", self.lora_name)
            self.lora_name = None

    def cancel(self) -> None:
        """Nothing was loaded: be what it was before."""
        self.session.cancel()

    def abort(self, reason: str) -> None:
        """Mark as unusable; leave the engine's session so that the next update can open one."""
        if self._open and hasattr(self._engine, "end_weight_update"):
            try:
                self._call("end_weight_update")
            except EngineRefused as error:
                reason = f"{reason}; {error}"
        self._open = False
        self._held.clear()
        self._adapter = {}
        self.session.abort(reason)

    def readable(self) -> Sequence[str]:
        """Of the names noted in this update, those that the engine can show; none under tensor parallelism."""
        if self._engine is None or self._tp_size > 1 or not hasattr(self._engine, "get_weights_by_name"):
            return ()
        return [name for name in self._noted if self._rows(name) is not None]

    def _rows(self, name: str) -> Any:
        return self._engine.get_weights_by_name(name, truncate_size=self._read_rows)  # type: ignore[union-attr]

    def expected_parts(self, name: str, tensor: Tensor) -> Sequence[Piece]:
        """The first rows of `tensor`."""
        self._noted[name] = (tensor.dtype, tensor.device)
        return (Piece(tensor[: self._read_rows] if tensor.dim() else tensor, tensor.dtype),)

    def read_back(self, name: str) -> Sequence[Tensor]:
        """The first rows that the engine holds, in the dtype that was sent."""
        dtype, device = self._noted[name]
        return (torch.tensor(self._rows(name), dtype=dtype, device=device),)


def _share_by_device_identity() -> None:
    """Handles of device memory then name the device itself and not its number, which differs between processes."""
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()


def _accepted(result: Any) -> tuple[bool, str]:
    """SGLang answers with a pair (flag, message), an object with `success`, or nothing."""
    if isinstance(result, tuple | list):
        return (bool(result[0]), str(result[1]) if len(result) > 1 else "") if result else (True, "")
    if result is None or isinstance(result, bool):
        return result is not False, ""
    message = getattr(result, "message", None) or getattr(result, "error_message", "")
    return bool(getattr(result, "success", True)), str(message)
