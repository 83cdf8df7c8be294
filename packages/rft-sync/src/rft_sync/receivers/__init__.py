"""Where weights go."""

from rft_sync.receivers.module import ModuleReceiver
from rft_sync.receivers.protocol import LoadHandle, ReadableReceiver, TypedReceiver, UpdateSession, WeightReceiver
from rft_sync.receivers.recording import RecordingReceiver
from rft_sync.receivers.selection import receiver_for
from rft_sync.receivers.sglang import SGLangReceiver
from rft_sync.receivers.vllm import VLLMReceiver

__all__ = [
    "LoadHandle",
    "ModuleReceiver",
    "ReadableReceiver",
    "RecordingReceiver",
    "SGLangReceiver",
    "TypedReceiver",
    "UpdateSession",
    "VLLMReceiver",
    "WeightReceiver",
    "receiver_for",
]
