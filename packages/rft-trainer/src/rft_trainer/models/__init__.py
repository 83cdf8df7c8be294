"""Models under training and the head that scores tokens without materialising logits."""

from rft_trainer.models.actor import Actor, TokenScores
from rft_trainer.models.critic import Critic, RewardHead, TokenValues
from rft_trainer.models.layout import TokenLayout, packed_layout, padded_layout, shared_prompt_layout
from rft_trainer.models.loading import checkpoint_folder, load_causal_model, load_tokenizer, quieten_transformers
from rft_trainer.models.log_probs import chunked_log_probs, gather_log_probs
from rft_trainer.models.lora import AdapterConfig, WithoutAdapters, adapters_off

__all__ = [
    "Actor",
    "AdapterConfig",
    "Critic",
    "RewardHead",
    "TokenLayout",
    "TokenScores",
    "TokenValues",
    "WithoutAdapters",
    "adapters_off",
    "checkpoint_folder",
    "chunked_log_probs",
    "gather_log_probs",
    "load_causal_model",
    "load_tokenizer",
    "packed_layout",
    "padded_layout",
    "quieten_transformers",
    "shared_prompt_layout",
]
