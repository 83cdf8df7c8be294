"""vLLM in the trainer's process."""

from rft_engines.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
