"""Reading engines' answers, where the same word is kept differently by each."""

from collections.abc import Mapping
from typing import Any

from rft_engines.errors import MissingLogProbError


def sampled_log_prob(candidates: Mapping[int, Any], token_id: int) -> float:
    """The log-probability of the token that was sampled, out of a step's map of candidates.

    The map's first entry is the likeliest token, which need not be the sampled one.

    Args:
        candidates: token id -> number, or an object with a `logprob`.
        token_id: the sampled id.

    Raises:
        MissingLogProbError: the map lacks the sampled token.
    """
    if token_id not in candidates:
        raise MissingLogProbError(
            f"the engine sampled token {token_id} and returned log-probabilities of {sorted(candidates)} only: ask it "
            f"for the sampled token's"
        )
    found = candidates[token_id]
    return float(getattr(found, "logprob", found))
