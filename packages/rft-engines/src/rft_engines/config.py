"""How an engine is built."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from rft_engines.counts import is_count

ENGINE_KINDS = ("hf", "vllm", "sglang")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine.

    Attributes:
        kind: "hf" (embedded), "vllm" or "sglang".
        model_path: folder of a saved model; "" when a module is handed to `create_engine` (hf only).
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        tp_size: ranks that hold one engine together; 1 for hf.
        max_model_len: most tokens of prompt and response; None takes the model's limit.
        memory_utilization: share of the device an engine may fill (vLLM: all it uses; SGLang: weights and KV cache);
            not used by hf, nor where kv_cache_bytes is given.
        kv_cache_bytes: size of the KV cache. The reproducible choice for vLLM; hf takes 4 GiB when None. SGLang counts
            tokens instead: give options={"max_total_tokens": ...} there.
        max_rows: samples decoded together at most; None takes the engine's own default (hf: 64).
        seed: base seed, the same on all ranks; None counts as 0.
        enable_sleep: build the engine so that sleep frees memory.
        lora_rank: largest rank of an adapter that is applied while generating; 0 for an engine without adapters. hf
            takes any rank, and needs no word of it before.
        load_weights: False starts without reading the checkpoint; a weight update must then come first.
        device: where hf puts the model; None leaves a module where it is and loads a folder on the CPU.
        options: engine arguments by the engine's own names, passed on as they are and winning over the fields above.
    """

    kind: str = "hf"
    model_path: str = ""
    dtype: str = "auto"
    tp_size: int = 1
    max_model_len: int | None = None
    memory_utilization: float = 0.5
    kv_cache_bytes: int | None = None
    max_rows: int | None = None
    seed: int | None = 0
    enable_sleep: bool = False
    lora_rank: int = 0
    load_weights: bool = True
    device: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # What a caller without a type checker may have given.
        options: Any = self.options
        share: Any = self.memory_utilization
        if not isinstance(options, Mapping):
            raise ValueError(f"EngineConfig.options={self.options!r}: give a mapping of names to values")  # noqa: TRY004
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        if self.kind not in ENGINE_KINDS:
            raise ValueError(f"EngineConfig.kind={self.kind!r}: give one of {list(ENGINE_KINDS)}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"EngineConfig.dtype={self.dtype!r}: give one of {list(_DTYPES)}")
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(
                f"EngineConfig.memory_utilization={self.memory_utilization!r}: give a share above 0, at most 1"
            )
        for name in ("tp_size", "max_model_len", "kv_cache_bytes", "max_rows"):
            value = getattr(self, name)
            if (value is not None or name == "tp_size") and not is_count(value):
                raise ValueError(f"EngineConfig.{name}={value!r}: give an integer of at least 1")
        if not is_count(self.lora_rank, 0):
            raise ValueError(f"EngineConfig.lora_rank={self.lora_rank!r}: give an integer, 0 for no adapters")
        if self.seed is None:
            object.__setattr__(self, "seed", 0)
        elif not is_count(self.seed, 0):
            raise ValueError(f"EngineConfig.seed={self.seed!r}: give an integer of 0 or above")
        if self.kind != "hf" and not self.model_path:
            raise ValueError(
                f"EngineConfig.model_path is empty: engine {self.kind!r} needs the folder of a saved model"
            )

    @classmethod
    def field_names(cls) -> list[str]:
        """Names a keyword of `create_engine` may have."""
        return [each.name for each in fields(cls)]

    def __reduce__(self) -> Any:
        # A read-only view does not pickle; configs cross processes.
        values = {name: getattr(self, name) for name in self.field_names()}
        return _rebuilt, (values | {"options": dict(self.options)},)


def _rebuilt(values: dict[str, Any]) -> EngineConfig:
    return EngineConfig(**values)
