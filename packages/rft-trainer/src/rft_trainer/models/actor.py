"""The Actor: a Hugging Face causal model that returns log-probabilities of response tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rft_trainer.errors import UnsupportedCombination
from rft_trainer.models.layout import TokenLayout
from rft_trainer.models.log_probs import chunked_log_probs
from rft_trainer.models.lora import AdapterConfig, add_adapters
from rft_trainer.optim import freeze_prefixes


class TokenScores(NamedTuple):
    """Scores of response tokens (a tuple, so that the hooks of FSDP2 and ZeRO find the tensors).

    log_probs: [B, T] fp32, 0 outside the mask.
    entropy: [B, T] fp32, of the distribution that was scored; 0 outside the mask.
    """

    log_probs: Tensor
    entropy: Tensor


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

    def add_adapters(self, config: AdapterConfig) -> None:
        """Train low-rank adapters and nothing else, before the model is wrapped.

        Raises ConfigurationError when the extra is missing or a target matches no layer, UnsupportedCombination when
        one is the output layer.
        """
        self.model = add_adapters(self.model, config)

    def checkpoint_activations(self) -> None:
        """Keep only the inputs of each block in forward and compute the rest again in backward."""
        # Non-reentrant, because frozen lower blocks leave the first inputs without a gradient.
        cast(Any, self.model).gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self.model.config

    def forward(self, layout: TokenLayout) -> TokenScores:
        """Score the response tokens of `layout`, [B, T]."""
        decoder = cast(Any, self.model).get_decoder()
        hidden = decoder(
            input_ids=layout.input_ids,
            attention_mask=layout.attention_mask,
            position_ids=layout.position_ids,
            use_cache=False,
        )[0]
        mask = layout.mask
        head = cast(Any, self.model).get_output_embeddings()
        log_probs, entropy = head(hidden.flatten(0, 1)[layout.predictors[mask]], layout.labels[mask], **self._scoring)
        return TokenScores(_scatter(log_probs, mask), _scatter(entropy, mask))


def _scatter(flat: Tensor, mask: Tensor) -> Tensor:
    """[N] values into the true cells of [B, T], row by row; 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)
