"""The Actor: a Hugging Face causal model that returns log-probabilities of response tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rft_trainer.errors import UnsupportedCombination
from rft_trainer.models.log_probs import chunked_log_probs
from rft_trainer.optim import freeze_prefixes


@dataclass(frozen=True)
class TokenScores:
    """Scores of the marked tokens of each row, moved to the left.

    log_probs: [B, T] fp32, T the largest number of marked tokens in a row; 0 behind the end of a row.
    entropy: [B, T] fp32, of the distribution that was scored.
    mask: [B, T] bool, where a score stands.
    """

    log_probs: Tensor
    entropy: Tensor
    mask: Tensor


class LogProbHead(nn.Linear):
    """An output layer that scores labels chunk by chunk when it is given labels.

    A module of its own, called as a module, so that FSDP2 and ZeRO-3 hold its weight during the computation.
    """

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        *,
        temperature: float = 1.0,
        top_p: float | None = None,
        top_k: int | None = None,
    ) -> Any:
        """Logits [..., V] of `hidden` [..., H]; with `labels` [N]: (log-probs [N], entropy [N]) of `hidden` [N, H]."""
        if labels is None:
            return super().forward(hidden)
        return chunked_log_probs(
            hidden,
            self.weight,
            labels,
            bias=self.bias,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            with_entropy=True,
        )


class Actor(nn.Module):
    """Scores tokens of given sequences under a causal language model.

    `temperature`, `top_p` and `top_k` are those of the rollouts, so that an on-policy ratio is 1.
    Raises UnsupportedCombination when the output layer is not a plain linear layer.
    """

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> None:
        super().__init__()
        head = cast(Any, model).get_output_embeddings()
        if type(head) not in (nn.Linear, LogProbHead):
            raise UnsupportedCombination(
                f"an output layer of class {type(head).__name__} and chunked log-probabilities: "
                "only torch.nn.Linear is known; train a model with a plain lm_head"
            )
        # The class changes in place: the parameter, its name and its tie to the embedding stay.
        head.__class__ = LogProbHead
        self.model = model
        # Greedy rollouts (temperature 0) have no distribution to match; they are scored at temperature 1.
        self._scoring = {"temperature": temperature or 1.0, "top_p": top_p, "top_k": top_k or None}

    def freeze(self, prefixes: Sequence[str]) -> list[str]:
        """Fix the parameters whose checkpoint name begins with one of `prefixes`, before the model is wrapped.

        Raises ConfigurationError when a prefix matches nothing or nothing is left to train.
        """
        return freeze_prefixes(self.model, prefixes)

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self.model.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor, score_mask: Tensor) -> TokenScores:
        """Score the tokens marked in `score_mask`.

        Args:
            input_ids: [B, L] int64, padded on either side.
            attention_mask: [B, L] bool or int, 1 on real tokens.
            score_mask: [B, L] bool, tokens to score; never a row's first real token, which nothing predicts.

        Raises:
            ValueError: shapes disagree, or a marked token has no predecessor.
        """
        if not input_ids.shape == attention_mask.shape == score_mask.shape:
            raise ValueError(
                f"input_ids {tuple(input_ids.shape)}, attention_mask {tuple(attention_mask.shape)} and score_mask "
                f"{tuple(score_mask.shape)} must have one shape [B, L]"
            )
        predecessor = torch.nn.functional.pad(attention_mask[:, :-1].bool(), (1, 0))
        if bool((score_mask & ~(predecessor & attention_mask.bool())).any()):
            raise ValueError("score_mask marks a padding token or a row's first token: mark response tokens only")
        # Positions count real tokens only, so left and right padding give the same numbers.
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
        decoder = cast(Any, self.model).get_decoder()
        hidden = decoder(
            input_ids=input_ids, attention_mask=attention_mask.long(), position_ids=position_ids, use_cache=False
        )[0]
        shifted = score_mask[:, 1:]
        head = cast(Any, self.model).get_output_embeddings()
        flat_log_probs, flat_entropy = head(hidden[:, :-1][shifted], input_ids[:, 1:][shifted], **self._scoring)
        counts = score_mask.sum(-1)
        width = int(counts.max()) if counts.numel() else 0
        mask = torch.arange(width, device=counts.device) < counts[:, None]
        return TokenScores(_scatter(flat_log_probs, mask), _scatter(flat_entropy, mask), mask)


def _scatter(flat: Tensor, mask: Tensor) -> Tensor:
    """[N] values into the true cells of [B, T], row by row; 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)
