"""Named configurations: each recipe is a function that returns one."""

from collections.abc import Callable
from pathlib import Path

from rft_trainer.config import RFTConfig

SMOLLM2 = "smollm2-135m-instruct"
"""`--pretrain` of the checkpoint that comes with the extra `smollm2`."""
GENERATED = "generated"
"""`--dataset` and `--eval_dataset` of the problems that this app generates."""


def quickstart() -> RFTConfig:
    """Grade-school problems on two CPU cores in minutes: SmolLM2-135M-Instruct, GRPO, upper layers only."""
    return RFTConfig(
        pretrain=SMOLLM2,
        dataset=GENERATED,
        eval_dataset=GENERATED,
        eval_limit=128,
        prompt_max_len=256,
        generate_max_len=24,
        rollout_batch_size=8,
        n_samples_per_prompt=8,
        micro_train_batch_size=16,
        actor_learning_rate=2e-5,
        # Without it the model learns to add, and forgets to take away.
        init_kl_coef=0.1,
        freeze=("model.embed_tokens", *(f"model.layers.{layer}." for layer in range(18))),
        share_prompts=True,
        temperature=0.7,
        max_steps=12,
        output_dir=Path("runs/gsm8k-quickstart"),
    )


RECIPES: dict[str, Callable[[], RFTConfig]] = {"quickstart": quickstart}
