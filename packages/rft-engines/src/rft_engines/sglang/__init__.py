"""SGLang beside the trainer, one engine for each TP group."""

from rft_engines.sglang.engine import SGLangEngine

__all__ = ["SGLangEngine"]
