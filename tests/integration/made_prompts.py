"""What the training runs of several tests share: made prompts, a reward that a random byte model can move, weights."""

from collections.abc import Sequence

from torch import Tensor, nn

from rft_rewards import RewardSample
from rft_sync import source_for
from rft_trainer.data import PromptDataset, RecordFields


def made_prompts(tokenizer, count: int) -> PromptDataset:
    """Prompts `say 0`, `say 1` and so on, without a reference answer."""
    fields = RecordFields(reference_key=None)
    records = [fields.record({"question": f"say {i}"}, f"made:{i}") for i in range(count)]
    return PromptDataset(records, tokenizer, max_prompt_tokens=200)


def low_bytes(samples: Sequence[RewardSample]) -> list[float]:
    """The share of token ids below 128."""
    return [sum(i < 128 for i in s.response_ids) / max(1, len(s.response_ids)) for s in samples]


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all weights under the names of the checkpoint. Collective where they are sharded."""
    source = source_for(module)
    names = [meta.name for meta in source.metadata()]
    with source.gather(names) as tensors:
        return {name: tensors[name].detach().clone() for name in names}
