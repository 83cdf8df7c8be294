"""vLLM, SGLang and an embedded engine behind one rollout contract."""

__all__: list[str] = []
