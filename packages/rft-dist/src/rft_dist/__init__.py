"""Process groups, gathering and collectives for SPMD reinforcement fine-tuning."""

__all__: list[str] = []
