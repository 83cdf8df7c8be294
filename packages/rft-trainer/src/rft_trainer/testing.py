"""A tiny real model for tests: byte-level tokenizer with a chat template, two Llama blocks, seeded weights."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_dist import all_reduce_metrics, balanced_micro_batches

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """One token per byte (ids 0 to 255) and three special tokens; reads back any text exactly."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw,
        pad_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        extra_special_tokens=[SPECIAL_TOKENS[1]],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model_folder(folder: Path, *, seed: int = 0, hidden: int = 64, layers: int = 2, tie: bool = True) -> Path:
    """Write a causal model of about 0.1 M parameters and its tokenizer to `folder`, and return it.

    The vocabulary has 259 entries, which no even number of ranks divides.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class AloneDataParallel:
    """DataParallel of one rank, without a process group."""

    rank, size = 0, 1
    device = torch.device("cpu")

    def sum(self, values: Tensor) -> Tensor:
        """The values themselves, in float64."""
        return values.detach().to("cpu", torch.float64)

    def reduce_metrics(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Each metric's own value."""
        return {name: value for name, value in all_reduce_metrics(metrics).items() if isinstance(value, float)}

    def micro_batches(self, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Indices by micro-batch."""
        return balanced_micro_batches(lengths, max_tokens)

    def most(self, value: int) -> int:
        """The value itself."""
        return value

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The values as those of the one rank."""
        return [list(values)]

    def on_main(self, action: Callable[[], None]) -> None:
        """Run it."""
        action()

    def together(self, error: BaseException | None) -> None:
        """Raise it."""
        if error is not None:
            raise error
