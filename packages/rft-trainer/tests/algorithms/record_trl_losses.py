"""Write losses and gradients of TRL's GRPOTrainer on fixed tensors: to `trl_losses.json`, or to another file.

python record_trl_losses.py [FILE]
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch

LENGTHS = (7, 3, 5, 1)
COLUMNS = 7

# loss_type, importance_sampling_level, epsilon, epsilon_high, delta, beta; then words for what is switched on
CASES = {
    "grpo": ("grpo", "token", 0.2, 0.2, None, 0.0),
    "grpo_clip_higher": ("grpo", "token", 0.2, 0.28, None, 0.0),
    "bnpo": ("bnpo", "token", 0.2, 0.2, None, 0.0),
    "dapo": ("dapo", "token", 0.2, 0.28, None, 0.0),
    "dr_grpo": ("dr_grpo", "token", 0.2, 0.2, None, 0.0),
    "gspo": ("grpo", "sequence", 3e-4, 4e-4, None, 0.0),
    "gspo_wide": ("grpo", "sequence", 0.2, 0.2, None, 0.0),
    "cispo": ("cispo", "token", 0.2, 5.0, None, 0.0),
    "sapo": ("sapo", "token", 0.2, 0.2, None, 0.0),
    "two_sided": ("grpo", "token", 0.2, 0.2, 3.0, 0.0),
    "grpo_kl": ("grpo", "token", 0.2, 0.2, None, 0.04),
    "truncated_importance": ("dapo", "token", 0.2, 0.28, None, 0.0, "importance"),
    "high_entropy": ("dapo", "token", 0.2, 0.28, None, 0.0, "entropy"),
}


def fixed_tensors() -> dict[str, torch.Tensor]:
    """Columns [4, 7], advantages [4] and a mask with holes: a closed form, no random numbers."""
    grid = torch.arange(len(LENGTHS) * COLUMNS, dtype=torch.float64).reshape(len(LENGTHS), COLUMNS)
    mask = torch.arange(COLUMNS)[None, :] < torch.tensor(LENGTHS)[:, None]
    mask[0, 2:4] = mask[2, 1] = False
    return {
        "log_probs": (-1.5 + torch.sin(grid * 1.7)).float(),
        "old_log_probs": (-1.5 + torch.sin(grid * 1.7) + 0.6 * torch.cos(grid * 2.3)).float(),
        "ref_log_probs": (-1.4 + torch.sin(grid * 1.7) + 0.3 * torch.sin(grid * 0.9)).float(),
        "engine_log_probs": (-1.5 + torch.sin(grid * 1.7) + 0.9 * torch.cos(grid * 1.1)).float(),
        "entropies": (1.0 + torch.sin(grid * 3.1)).float(),
        "advantages": torch.tensor([0.9, -1.2, 0.4, -0.1]),
        "mask": mask.float(),
    }


def trl_loss(case: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient at the log-probs [4, 7]) of TRL's own `_compute_loss`, the model replaced by given log-probs."""
    from trl import GRPOTrainer

    loss_type, level, epsilon, epsilon_high, delta, beta, *words = case
    tensors = fixed_tensors()
    log_probs = tensors["log_probs"].clone().requires_grad_()
    ids = torch.ones(len(LENGTHS), COLUMNS, dtype=torch.long)

    class Recorder(SimpleNamespace):
        get_off_policy_mask = staticmethod(GRPOTrainer.get_off_policy_mask)
        get_high_entropy_mask = GRPOTrainer.get_high_entropy_mask

    trainer = Recorder(
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_probs, tensors["entropies"], None),
        aux_loss_enabled=False,
        top_entropy_quantile=0.5 if "entropy" in words else 1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=epsilon,
        epsilon_high=epsilon_high,
        args=SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        use_vllm="importance" in words,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=10,
        _entropy_bonus_enabled=False,
        _metrics={"train": __import__("collections").defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1,
            reduce=lambda x, reduction: x,
            gather=lambda x: x,
            pad_across_processes=lambda x, dim, pad_index: x,
        ),
    )
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": tensors["mask"],
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old_log_probs"],
        "ref_per_token_logps": tensors["ref_log_probs"],
        "num_items_in_batch": tensors["mask"].sum(),
        # the formula of its rollout code for "token_truncate" with an upper bound of 2
        "importance_sampling_ratio": (tensors["old_log_probs"] - tensors["engine_log_probs"]).exp().clamp(max=2.0),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.detach(), log_probs.grad


def main() -> None:
    """Record every case."""
    record = {"trl": version("trl"), "cases": {}}
    for name, case in CASES.items():
        loss, gradient = trl_loss(case)
        record["cases"][name] = {
            "loss": round(float(loss), 8),
            "gradient": [[round(float(cell), 8) for cell in row] for row in gradient],
        }
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("trl_losses.json")
    target.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
