"""Named configurations: each recipe is a function that returns one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rft_trainer.config import RFTConfig

SMOLLM2 = "smollm2-135m-instruct"
"""`--pretrain` of the checkpoint that comes with the extra `smollm2`."""
GENERATED = "generated"
"""`--dataset` and `--eval_dataset` of the problems that this app generates."""
GSM8K = "openai/gsm8k"
"""The real problems on the hub; their two files serve as well."""


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


def smollm2_gsm8k() -> RFTConfig:
    """GSM8K itself on one GPU in ten minutes: warm start on the train answers, GRPO, evaluation of the test split."""
    return RFTConfig(
        pretrain=SMOLLM2,
        dataset=GSM8K,
        eval_dataset=GSM8K,
        # The base model is asked in the same words, and they name the form.
        system_prompt="Solve the problem step by step. Write the final number at the end after ####.",
        prompt_max_len=512,
        generate_max_len=256,
        fsdp=True,
        warm_start_epochs=3,
        warm_start_learning_rate=3e-4,
        warm_start_lr_warmup_steps=10,
        warm_start_batch_size=64,
        warm_start_max_tokens=16384,
        warm_start_packing=True,
        engine_type="vllm",
        # Weights, optimiser and cache of a model of this size lie beside each other, three such runs on one H200.
        engine_kv_gib=12.0,
        # The host schedules: the more samples a step decodes, the less of it each costs.
        engine_options='{"max_num_seqs": 1024, "compilation_config": {"max_cudagraph_capture_size": 1024}}',
        rollout_batch_size=256,
        n_samples_per_prompt=8,
        # Nearer to the greedy answers that count: fewer of them fail by an unlucky token.
        temperature=0.8,
        # One answer in thirteen is right. Problems with short solutions, and credit for each of their calculations,
        # give nearly every group a spread.
        reference_max_len=80,
        partial_credit=0.5,
        # Groups of equal scores are not trained on; one round, so they are not replaced.
        dynamic_sampling=True,
        dynamic_sampling_rounds=1,
        train_batch_size=256,
        max_tokens_per_micro_batch=16384,
        packing=True,
        actor_learning_rate=2e-5,
        lr_warmup_steps=5,
        policy_loss="clip_higher",
        init_kl_coef=1e-2,
        max_steps=200,
        max_seconds=530.0,
        eval_samples=8,
        eval_temperature=1.0,
        eval_pass_at=(8,),
        eval_greedy=True,
        eval_extractors=True,
        eval_symbolic=True,
        output_dir=Path("runs/smollm2-gsm8k"),
    )


def smollm2_gsm8k_control() -> RFTConfig:
    """The same seconds of further supervised training, from the warm start of a run of `smollm2-gsm8k`."""
    recipe = smollm2_gsm8k()
    return replace(
        recipe,
        pretrain=str(recipe.output_dir / "warm_start"),
        warm_start_epochs=0,
        # To be set to what the run's reinforcement took.
        warm_start_seconds=300.0,
        max_steps=0,
        output_dir=Path("runs/smollm2-gsm8k-control"),
    )


RECIPES: dict[str, Callable[[], RFTConfig]] = {
    "quickstart": quickstart,
    "smollm2-gsm8k": smollm2_gsm8k,
    "smollm2-gsm8k-control": smollm2_gsm8k_control,
}
