"""A plain PyTorch training loop that keeps an engine up to date with rft-sync and nothing else.

    python apps/sync_only                                   one process
    torchrun --nproc_per_node 2 apps/sync_only              FSDP2 over two processes
    torchrun --nproc_per_node 1 apps/sync_only --vllm DIR   a checkpoint folder trained, vLLM as the engine

The model learns to continue `a, b, a+b mod 10, ...`. The engine is a second module that only ever gets weights from the
broadcast; its greedy answers show that they arrive.
"""

import argparse
import copy
import gc
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rft_sync import BroadcastManager

DIGITS = 10


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


def train(steps: int, every: int, seed: int) -> float:
    """Train, broadcast every `every` steps, and return the engine's share of right answers."""
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
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps")
    parser.add_argument("--every", type=int, default=10, help="broadcast every so many steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model")
    parser.add_argument("--vllm", metavar="DIR", help="train this checkpoint folder, with vLLM as the engine")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    if arguments.vllm:
        train_into_vllm(arguments.vllm, min(arguments.steps, 3))
    else:
        right = train(arguments.steps, arguments.every, arguments.seed)
        print(f"the engine answers {right:.0%} of all pairs rightly")
    if dist.is_initialized():
        gc.collect()  # FSDP2 modules are reference cycles that hold the group: one that outlives it aborts at exit
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
