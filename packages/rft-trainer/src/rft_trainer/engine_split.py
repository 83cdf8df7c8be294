"""Whether a rollout engine can be split over its ranks, from the model's config.json alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rft_trainer.config import RFTConfig
from rft_trainer.memory.shapes import read_config

_CUT = ("num_attention_heads", "intermediate_size")


def check_engine_split(config: RFTConfig) -> Iterator[str]:
    """One line for each number of the model that `engine_tp_size` ranks cannot share; no weights are read.

    Folders without a config.json are left to other checks.
    """
    split, folder = config.engine_tp_size, Path(config.pretrain or "").expanduser()
    if config.engine_type == "hf" or split < 2 or not (folder / "config.json").is_file():
        return
    text: Any = read_config(str(folder)).get_text_config()
    has_experts = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts"))
    for name in _CUT:
        size = getattr(text, name, None)
        # The width of an expert has a name of its own.
        if size and size % split and not (has_experts and name == "intermediate_size"):
            yield (
                f"engine_tp_size {split} and {name} {size} of {config.pretrain!r} do not work together: an engine of "
                f"{split} ranks takes a whole part of them on each; choose a divisor"
            )
    heads = getattr(text, "num_key_value_heads", None)
    if heads and heads % split and split % heads:
        yield (
            f"engine_tp_size {split} and num_key_value_heads {heads} of {config.pretrain!r} do not work together: one "
            "must be a multiple of the other"
        )
