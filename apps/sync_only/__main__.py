"""A plain PyTorch training loop that keeps an engine up to date with rft-sync and nothing else.

    python apps/sync_only                              one process
    torchrun --nproc_per_node 2 apps/sync_only         FSDP2 over two processes
    torchrun --nproc_per_node 1 apps/sync_only --engine_type vllm --pretrain DIR
                                                       a checkpoint folder trained, vLLM as the engine

The model learns to continue `a, b, a+b mod 10, ...`. The engine is a second module that only ever gets weights from the
broadcast; its greedy answers show that they arrive.
"""

import argparse
import copy
import gc
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rft_sync import BroadcastManager

DIGITS = 10
RECIPES = {"sums": (40, 10), "quick": (10, 5)}
"""Optimiser steps, and how many lie between two broadcasts."""


class SumModel(nn.Module):
    """Next digit from the last two."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(DIGITS, width)
        self.hidden = nn.Linear(2 * width, 4 * width)
        self.head = nn.Linear(4 * width, DIGITS)

    def forward(self, pairs: Tensor) -> Tensor:
        """Logits `[B, 10]` for pairs of digits `[B, 2]`."""
        return self.head(torch.relu(self.hidden(self.embed(pairs).flatten(1))))


def all_pairs() -> Tensor:
    """Every pair of digits, `[100, 2]`."""
    return torch.cartesian_prod(torch.arange(DIGITS), torch.arange(DIGITS))


def answer(engine: nn.Module, first: int, second: int, length: int) -> list[int]:
    """Greedy continuation by the engine."""
    digits = [first, second]
    with torch.no_grad():
        for _ in range(length):
            digits.append(int(engine(torch.tensor([digits[-2:]])).argmax()))
    return digits


def train(steps: int, every: int, seed: int, reports: Path | None) -> float:
    """Train, broadcast every `every` steps, and return the engine's share of right answers.

    `reports` gets a JSON line for each broadcast.
    """
    torch.manual_seed(seed)
    model: nn.Module = SumModel()
    engine = copy.deepcopy(model)
    if dist.is_initialized() and dist.get_world_size() > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    sync = BroadcastManager.connect(model, engine)  # the one line that connects
    pairs = all_pairs()
    targets = pairs.sum(dim=1) % DIGITS
    right = 0.0
    for step in range(1, steps + 1):
        loss = nn.functional.cross_entropy(model(pairs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            report = sync.broadcast_to_engine()  # the one line that sends
            right = float((engine(pairs).argmax(dim=1) == targets).float().mean())
            if int(os.environ.get("RANK", "0")) == 0:
                print(f"step {step} loss {loss.item():.4f} engine right {right:.2f} {answer(engine, 1, 1, 8)}")
                print(f"  {report}")
                if reports is not None:
                    line = {"step": step, "loss": loss.item(), "right": right, "version": report.version}
                    with reports.open("a") as stream:
                        stream.write(json.dumps({**line, "tensors": report.tensors_loaded}) + "\n")
    return right


def train_into_vllm(folder: str, steps: int) -> None:
    """Train a checkpoint folder on one sentence and let vLLM continue it after each update."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    engine = LLM(folder, distributed_executor_backend="external_launcher", enforce_eager=True, max_model_len=256)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder)(
        "The weights arrive in the engine after every step.", return_tensors="pt"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    sync = BroadcastManager.connect(model, engine)
    for _ in range(steps):
        loss = model(**tokens, labels=tokens["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(sync.broadcast_to_engine())
        outputs = engine.generate("The weights", SamplingParams(temperature=0, max_tokens=12, seed=0), use_tqdm=False)
        print(f"loss {loss.item():.4f}: {outputs[0].outputs[0].text!r}")


def main() -> None:
    """Parse flags and run."""
    parser = argparse.ArgumentParser(prog="sync_only", description="Train, and broadcast weights into an engine.")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="sums", help="steps and broadcasts")
    parser.add_argument("--max_steps", type=int, help="optimiser steps, in place of the recipe's")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model")
    parser.add_argument("--output_dir", type=Path, help="write reports.jsonl here")
    parser.add_argument("--engine_type", choices=("module", "vllm"), default="module", help="what is kept up to date")
    parser.add_argument("--pretrain", metavar="DIR", help="checkpoint folder to train, for --engine_type vllm")
    arguments = parser.parse_args()
    steps, every = RECIPES[arguments.recipe]
    steps = arguments.max_steps or steps
    if arguments.engine_type == "vllm" and arguments.pretrain is None:
        parser.error("--engine_type vllm needs --pretrain DIR, the folder of a checkpoint")
    reports = None
    if arguments.output_dir is not None:
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        reports = arguments.output_dir / "reports.jsonl"
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    if arguments.engine_type == "vllm":
        train_into_vllm(arguments.pretrain, min(steps, 3))
    else:
        right = train(steps, every, arguments.seed, reports)
        print(f"the engine answers {right:.0%} of all pairs rightly")
    if dist.is_initialized():
        gc.collect()  # FSDP2 modules are reference cycles that hold the group: one that outlives it aborts at exit
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
