"""Scoring of model responses: answers, format, shaping, reward models."""

__all__: list[str] = []
