"""A LoRA adapter into an in-process vLLM, which takes adapters as PEFT files only."""

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rft_sync.errors import EngineRefused
from rft_sync.receivers.vllm_model import struct_fields

ADAPTER_ID = 1


def load_adapter(
    engine: Any,
    request: Callable[..., Any],
    save: Callable[[dict[str, Tensor], str], object],
    factors: Mapping[str, Tensor],
    config: str,
    *,
    replaces: bool,
) -> Any:
    """Write PEFT files to memory-backed storage and load them in place under the one name.

    Args:
        engine: vLLM's engine.
        request: vLLM's `LoRARequest`.
        save: Writes tensors to a file of that name, as safetensors.
        factors: By PEFT's names, on the host.
        config: PEFT configuration as JSON.
        replaces: An adapter of that name is loaded.

    Returns:
        The request to generate with. The adapter stays loaded under its id; a request that reloads would look for the
        files, which are gone.

    Raises:
        EngineRefused: vLLM said no.
    """
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        save(dict(factors), str(Path(folder) / "adapter_model.safetensors"))
        (Path(folder) / "adapter_config.json").write_text(config)
        fields = {"lora_name": "policy", "lora_int_id": ADAPTER_ID, "lora_path": folder}
        if replaces and "load_inplace" not in struct_fields(request):
            engine.remove_lora(ADAPTER_ID)
        inplace = {"load_inplace": True} if "load_inplace" in struct_fields(request) else {}
        if not engine.add_lora(request(**fields, **inplace)):
            rank = json.loads(config).get("r")
            raise EngineRefused(f"vLLM did not take the adapter (rank {rank}); check max_lora_rank and max_loras")
    return request(**fields)
