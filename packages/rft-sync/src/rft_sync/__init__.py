"""Broadcast training weights into an inference engine, from any PyTorch trainer."""

__all__: list[str] = []
