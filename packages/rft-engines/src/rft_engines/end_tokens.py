"""The ids that end a response."""

from typing import Any


def end_token_ids(config: Any, tokenizer: Any = None, generation_config: Any = None) -> tuple[int, ...]:
    """End-of-sequence ids of a model's config, its tokenizer and its generation config, each one id or a list.

    The first is the config's. A generation config names further ids that end a turn; nothing else is read from it.
    """
    ids: list[int] = []
    for source in (config, tokenizer, generation_config):
        found = getattr(source, "eos_token_id", None)
        ids.extend(found if isinstance(found, (list, tuple)) else [found] if found is not None else [])
    return tuple(dict.fromkeys(int(token) for token in ids))
