"""The embedded engine: batched decoding of any transformers causal model in this process."""

from rft_engines.hf.engine import HFEngine

__all__ = ["HFEngine"]
