"""Where weights come from."""

from rft_sync.sources.assembly import CheckpointSource, SourceStatistics
from rft_sync.sources.lora import AdapterSource, BaseWeightsSource, MergedLoRASource
from rft_sync.sources.protocol import ParameterSource
from rft_sync.sources.selection import source_for
from rft_sync.sources.whole import FSDPSource, ModuleSource, ZeroSource

__all__ = [
    "AdapterSource",
    "BaseWeightsSource",
    "CheckpointSource",
    "FSDPSource",
    "MergedLoRASource",
    "ModuleSource",
    "ParameterSource",
    "SourceStatistics",
    "ZeroSource",
    "source_for",
]
