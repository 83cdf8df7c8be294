"""Broadcast training weights into an inference engine, from any PyTorch trainer."""

from rft_sync.adapters import AdapterBroadcastManager
from rft_sync.errors import (
    EngineNotReady,
    EngineRefused,
    IncompleteGroup,
    ManifestMismatch,
    NonFiniteWeight,
    ShapeMismatch,
    UnknownTensor,
    UnsupportedCombination,
    VerificationFailed,
    WeightSyncError,
)
from rft_sync.fingerprint import fingerprint
from rft_sync.fusion import fused_groups
from rft_sync.manager import BroadcastConfig, BroadcastManager
from rft_sync.manifest import Manifest, build_manifest
from rft_sync.naming import PrefixMap
from rft_sync.parameters import Bucket, FlatTensor, ParamMeta, plan_buckets
from rft_sync.receivers import (
    ModuleReceiver,
    RecordingReceiver,
    SGLangReceiver,
    VLLMReceiver,
    WeightReceiver,
    receiver_for,
)
from rft_sync.receivers.copy_plan import CopyPlan
from rft_sync.report import SyncReport
from rft_sync.scan import Piece
from rft_sync.sources import (
    AdapterSource,
    BaseWeightsSource,
    FSDPSource,
    MergedLoRASource,
    ModuleSource,
    ParameterSource,
    ZeroSource,
    source_for,
)
from rft_sync.transfer import receive_weights, send_weights
from rft_sync.verification import Verification, verify

__all__ = [
    "AdapterBroadcastManager",
    "AdapterSource",
    "BaseWeightsSource",
    "BroadcastConfig",
    "BroadcastManager",
    "Bucket",
    "CopyPlan",
    "EngineNotReady",
    "EngineRefused",
    "FSDPSource",
    "FlatTensor",
    "IncompleteGroup",
    "Manifest",
    "ManifestMismatch",
    "MergedLoRASource",
    "ModuleReceiver",
    "ModuleSource",
    "NonFiniteWeight",
    "ParamMeta",
    "ParameterSource",
    "Piece",
    "PrefixMap",
    "RecordingReceiver",
    "SGLangReceiver",
    "ShapeMismatch",
    "SyncReport",
    "UnknownTensor",
    "UnsupportedCombination",
    "VLLMReceiver",
    "Verification",
    "VerificationFailed",
    "WeightReceiver",
    "WeightSyncError",
    "ZeroSource",
    "build_manifest",
    "fingerprint",
    "fused_groups",
    "plan_buckets",
    "receive_weights",
    "receiver_for",
    "send_weights",
    "source_for",
    "verify",
]
