"""Which receiver fits an engine."""

from typing import Any

from torch import nn

from rft_sync.errors import EngineNotReady, UnsupportedCombination
from rft_sync.live import is_kind
from rft_sync.receivers.module import ModuleReceiver
from rft_sync.receivers.protocol import WeightReceiver
from rft_sync.receivers.sglang import SGLangReceiver
from rft_sync.receivers.vllm import VLLMReceiver


def receiver_for(native: Any) -> WeightReceiver:
    """The receiver for a raw engine, told by its class and never by importing engines.

    Args:
        native: A torch module, a `vllm.LLM`, a `sglang.Engine`, or a receiver (returned as it is).

    Raises:
        EngineNotReady: None was given: the engine is closed or was never made.
        UnsupportedCombination: Anything else.
    """
    if native is None:
        raise EngineNotReady("the engine is gone (None); create it before connecting")
    if isinstance(native, nn.Module):
        return ModuleReceiver(native)
    if isinstance(native, WeightReceiver):
        return native
    if is_kind(native, "LLM") and hasattr(native, "apply_model"):
        return VLLMReceiver(native)
    if is_kind(native, "Engine") and hasattr(native, "update_weights_from_tensor"):
        return SGLangReceiver(native)
    kinds = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(native).__mro__}
    raise UnsupportedCombination(
        f"{'/'.join(sorted(kinds - {'builtins.object'}))} and receiver_for: give a torch module, vllm.LLM, "
        "sglang.Engine or a WeightReceiver (start, load, finish, abort)"
    )


def connected_receiver(engine: Any) -> tuple[WeightReceiver, Any]:
    """The receiver for an engine object or a raw engine, and the object whose session is kept; None for a raw engine.

    Raises:
        EngineNotReady: The engine is gone.
        UnsupportedCombination: No receiver fits it.
    """
    native = engine.native if hasattr(type(engine), "native") or hasattr(engine, "native") else engine
    receiver = receiver_for(native)
    if isinstance(receiver, SGLangReceiver) and hasattr(engine, "finish_weight_update"):
        receiver.flush = False  # the engine object knows whether its KV cache is resident, and resets it
    return receiver, None if native is engine else engine
