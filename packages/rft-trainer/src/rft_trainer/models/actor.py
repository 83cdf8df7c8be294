"""The Actor: a Hugging Face causal model that returns log-probabilities of response tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rft_trainer.algorithms import expert_counts
from rft_trainer.errors import UnsupportedCombination
from rft_trainer.models.layout import TokenLayout
from rft_trainer.models.log_probs import chunked_log_probs
from rft_trainer.models.lora import AdapterConfig, add_adapters
from rft_trainer.models.packing import attend_packed
from rft_trainer.optim import freeze_prefixes


class TokenScores(NamedTuple):
    """Scores of response tokens (a tuple, so that the hooks of FSDP2 and ZeRO find the tensors).

    log_probs: [B, T] fp32, 0 outside the mask.
    entropy: [B, T] fp32, of the distribution that was scored; 0 outside the mask.
    router_logits: [layers * N, E] of the N response tokens in every layer with experts, when asked for.
    expert_counts: [B, E] how often each expert was chosen for a row's response tokens, over all layers.
    """

    log_probs: Tensor
    entropy: Tensor
    router_logits: Tensor | None = None
    expert_counts: Tensor | None = None


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


def without_dropout(model: nn.Module) -> nn.Module:
    """`model` with every dropout at 0: in training mode it scores as in evaluation, so an on-policy ratio is 1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Some models keep probabilities as numbers: dropout, attention_dropout, activation_dropout, attn_pdrop, ...
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def checkpoint_blocks(model: Any) -> None:
    """Recompute the blocks of a transformers model in backward."""
    # Non-reentrant, because frozen lower blocks leave the first inputs without a gradient.
    model.gradient_checkpointing_enable({"use_reentrant": False})


def decode(decoder: Any, layout: TokenLayout, **options: Any) -> Any:
    """The decoder's output for the rows of `layout`; its first entry is the hidden states [R, L, H]."""
    if layout.cumulative_lengths is not None:
        attend_packed(decoder)
        edges, longest = layout.cumulative_lengths, layout.longest
        options |= {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest}
    return decoder(
        input_ids=layout.input_ids,
        attention_mask=layout.attention_mask,
        position_ids=layout.position_ids,
        use_cache=False,
        **options,
    )


class Actor(nn.Module):
    """Scores tokens of given sequences under a causal language model.

    Temperatures, `top_p` and `top_k` are those of the rollouts, so that an on-policy ratio is 1; for the same
    reason no dropout is left in the model.
    Raises UnsupportedCombination when the output layer is not a plain linear layer.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        first_token_temperature: float | None = None,
    ) -> None:
        super().__init__()
        head = cast(Any, model).get_output_embeddings()
        if type(head) not in (nn.Linear, LogProbHead):
            raise UnsupportedCombination(
                f"an output layer of class {type(head).__name__} and chunked log-probabilities: "
                "only torch.nn.Linear is known; train a model with a plain lm_head"
            )
        # The class changes in place: the parameter, its name and its tie to the embedding stay.
        head.__class__ = LogProbHead
        self.model = without_dropout(model)
        self._scoring = self.scoring_of(
            temperature=temperature, top_p=top_p, top_k=top_k, first_token_temperature=first_token_temperature
        )

    @staticmethod
    def scoring_of(
        *, temperature: float, top_p: float, top_k: int, first_token_temperature: float | None = None
    ) -> dict[str, Any]:
        """What is scored for rollouts with these numbers."""
        # Engines report greedy rollouts (temperature 0) under the full distribution at temperature 1.
        if temperature == 0:
            return {"temperature": 1.0, "top_p": 1.0, "top_k": None, "first_token_temperature": None}
        return {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k or None,
            "first_token_temperature": first_token_temperature,
        }

    @property
    def scoring(self) -> Mapping[str, Any]:
        """Temperatures, top_p and top_k of the distribution that is scored."""
        return self._scoring

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
        checkpoint_blocks(self.model)

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self.model.config

    @property
    def experts(self) -> tuple[int, int] | None:
        """(experts, experts chosen for a token) of a mixture of experts; None for a dense model."""
        config = self.config.get_text_config()
        count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        return None if not count else (int(count), int(config.num_experts_per_tok))

    def forward(self, layout: TokenLayout, *, with_experts: bool = False) -> TokenScores:
        """Score the response tokens of `layout`, [B, T]; `with_experts` adds what the balance of experts needs."""
        decoder = cast(Any, self.model).get_decoder()
        output = decode(decoder, layout, **({"output_router_logits": True} if with_experts else {}))
        scores = self._score_tokens(output[0].flatten(0, 1), layout)
        return self._with_experts(scores, output.router_logits, layout) if with_experts else scores

    def _score_tokens(self, hidden: Tensor, layout: TokenLayout) -> TokenScores:
        """Log-probabilities and entropies [B, T] from hidden states [R * L, H]."""
        head = cast(Any, self.model).get_output_embeddings()
        options = dict(self._scoring)
        first = options.pop("first_token_temperature")
        cells, shape = layout.cells, layout.mask.shape
        parts = [(cells, options)]
        if first is not None:
            is_first = cells % shape[1] == 0
            parts = [(cells[~is_first], options), (cells[is_first], {**options, "temperature": first})]
        predictors, labels = layout.predictors.flatten(), layout.labels.flatten()
        scores = [
            tuple(scatter_tokens(flat, part, shape) for flat in head(hidden[predictors[part]], labels[part], **how))
            for part, how in parts
        ]
        # Each token is in one part and 0 in the other.
        log_probs, entropy = (sum(columns[1:], columns[0]) for columns in zip(*scores, strict=True))
        return TokenScores(log_probs, entropy)

    def _with_experts(self, scores: TokenScores, layers: Sequence[Tensor], layout: TokenLayout) -> TokenScores:
        assert self.experts is not None
        places = layout.predictors.flatten()[layout.cells]
        logits = torch.cat([layer.flatten(0, -2)[places] for layer in layers])
        rows = (layout.cells // layout.mask.shape[1]).repeat(len(layers))
        counts = [expert_counts(logits.detach(), rows == row, self.experts[1]) for row in range(len(layout.mask))]
        return scores._replace(router_logits=logits, expert_counts=torch.stack(counts))


def scatter_tokens(flat: Tensor, cells: Tensor, shape: torch.Size) -> Tensor:
    """[N] values into the flat `cells` [N] of [B, T]; 0 elsewhere. Neither direction waits for a GPU."""
    # hazard: not flat and reshaped behind: FSDP2 loses its backward hook on a view
    places = (cells // shape[1], cells % shape[1])
    return torch.zeros(shape, dtype=flat.dtype, device=flat.device).index_put(places, flat)
