"""The whole loop of apps/gsm8k on one GPU with vLLM, colocated with sleep: seconds and memory of each phase.

    python benchmarks/loop_gpu.py --dataset gsm8k/train.jsonl [--model smollm2|qwen1.5b] [--strategies fsdp zero2]
                                  [--steps 20] [--output RESULTS_DIR] [-- any further flag of apps/gsm8k]

`smollm2` is the checkpoint of the extra `smollm2`; `qwen1.5b` has the shape of Qwen2.5-1.5B, random weights and
SmolLM2's tokenizer: it shows memory and speed, no learning. Each strategy is one torchrun process of its own. A row is
the median over the steps after the first two. Written to RESULTS_DIR: loop.json, and metrics.jsonl of each run.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "apps" / "gsm8k"))
WARM_UP_STEPS = 2
STRATEGIES = {"fsdp": ["--fsdp"], "zero0": ["--zero_stage", "0"], "zero2": ["--zero_stage", "2"]}


def qwen_folder(folder: Path) -> Path:
    """Qwen2.5-1.5B's shape with random weights, written as a checkpoint."""
    from gsm8k_app.model_cache import smollm2_folder
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(model: str, strategy: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """One run; its metrics by step."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"),
        *(str(ROOT / "apps" / "gsm8k"), "--pretrain", model, *STRATEGIES[strategy]),
        *("--dataset", arguments.dataset, "--max_steps", str(arguments.steps), "--output_dir", str(folder)),
        *("--engine_type", "vllm", "--enable_engine_sleep", "--rollout_batch_size", "64"),
        *("--n_samples_per_prompt", "8", "--generate_max_len", "256", "--micro_train_batch_size", "32"),
        *arguments.further,
    ]
    subprocess.run(command, check=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "perf/seconds_step" in line]


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Median of each number over the steps after the warm-up."""
    kept = steps[WARM_UP_STEPS:] or steps
    names = sorted({name for step in kept for name, value in step.items() if isinstance(value, int | float)})
    return {name: statistics.median(step[name] for step in kept if name in step) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--model", choices=("smollm2", "qwen1.5b"), default="smollm2")
    parser.add_argument("--strategies", nargs="+", choices=sorted(STRATEGIES), default=["fsdp", "zero2"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("runs/loop_gpu"))
    parser.add_argument("further", nargs="*", help="flags of apps/gsm8k, after --")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = "smollm2-135m-instruct" if arguments.model == "smollm2" else str(qwen_folder(Path(scratch) / "model"))
        for strategy in arguments.strategies:
            folder = Path(scratch) / strategy
            results[strategy] = medians(run(model, strategy, arguments, folder))
            shutil.copy(folder / "metrics.jsonl", arguments.output / f"{arguments.model}-{strategy}.jsonl")
    (arguments.output / f"loop-{arguments.model}.json").write_text(json.dumps(results, indent=1))
    names = sorted({name for numbers in results.values() for name in numbers if name.split("/")[0] != "eval"})
    print(f"{arguments.model}, medians after {WARM_UP_STEPS} of {arguments.steps} steps".ljust(56), *results, sep="  ")
    for name in names:
        print(name.ljust(56), *(f"{numbers.get(name, float('nan')):.6g}" for numbers in results.values()), sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
