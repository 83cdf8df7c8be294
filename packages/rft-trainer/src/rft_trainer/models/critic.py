"""The Critic: the body of a causal model with one number per token in place of the vocabulary."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from rft_trainer.models.actor import checkpoint_blocks, decode, scatter_tokens, without_dropout
from rft_trainer.models.layout import TokenLayout
from rft_trainer.optim import freeze_prefixes


class TokenValues(NamedTuple):
    """values: [B, T] fp32, what the critic expects from before each response token on; 0 outside the mask."""

    values: Tensor


class RewardHead(nn.Linear):
    """One number per hidden state, [..., H] -> [...] fp32; it begins at 0, alike on every rank."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Products in the dtype of the weights, the result in fp32."""
        return super().forward(hidden.to(self.weight.dtype)).squeeze(-1).float()


class Critic(nn.Module):
    """Values of response tokens: V_t is read where token t is about to be chosen.

    Args:
        model: a causal model; its output layer is left behind, its body becomes the critic's own.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = without_dropout(cast(Any, model).get_decoder())
        self.head = RewardHead(cast(Any, self.model).config.get_text_config().hidden_size)

    def freeze(self, prefixes: Sequence[str]) -> list[str]:
        """Fix parameters by the names of the body, before the model is wrapped; see `Actor.freeze`."""
        return freeze_prefixes(self.model, prefixes)

    def checkpoint_activations(self) -> None:
        """Keep only the inputs of each block in forward and compute the rest again in backward."""
        checkpoint_blocks(self.model)

    def forward(self, layout: TokenLayout) -> TokenValues:
        """Values of the response tokens of `layout`, [B, T]."""
        hidden = decode(self.model, layout)[0]
        values: Tensor = self.head(hidden.flatten(0, 1)[layout.predictors.flatten()[layout.cells]])
        return TokenValues(scatter_tokens(values, layout.cells, layout.mask.shape))
