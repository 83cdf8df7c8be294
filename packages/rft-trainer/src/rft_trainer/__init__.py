"""Reinforcement fine-tuning of language models under plain torchrun."""

__all__: list[str] = []
