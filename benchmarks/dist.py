"""What rft-dist's collectives cost beside the obvious ways, as ratios, on gloo ranks of this host.

    uv run python benchmarks/dist.py

Each pair is measured in turns and the medians are compared, so that a busy host slows both sides alike.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from rft_dist import CollectiveGuard, Mean, all_reduce_metrics, gather_inputs
from rft_dist.testing import run_ranks

Context = AbstractContextManager[object]

KEYS = 40
PROMPTS = 16
FIELDS = ("prompt_token_ids", "text", "label", "reference", "image")


def median_seconds(
    pair: tuple[Callable[[], object], Callable[[], object]],
    rounds: int,
    contexts: tuple[Callable[[], Context], Callable[[], Context]] = (nullcontext, nullcontext),
) -> tuple[float, float]:
    """Median duration of each side; both are called in turns, after a warm-up. Collective over the default group."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds + 3):
        for side, call in enumerate(pair):
            with contexts[side]():
                dist.barrier()  # under a guard it also makes the guard's connections
                started = time.perf_counter()
                call()
                seconds = time.perf_counter() - started
            if round_ >= 3:
                times[side].append(seconds)
    return statistics.median(times[0]), statistics.median(times[1])


def metric_per_key(metrics: dict[str, Mean]) -> dict[str, float]:
    """One all_reduce of (total, count) for each key. Collective over the default group."""
    means = {}
    for key, metric in metrics.items():
        pair = torch.tensor([metric.total, metric.count], dtype=torch.float64)
        dist.all_reduce(pair)
        means[key] = float(pair[0] / pair[1])
    return means


def prompts(rank: int, image_size: int) -> list[dict]:
    """Prompts of 200 tokens, with an image of image_size x image_size where that is not 0."""
    image = torch.full((3, image_size, image_size), rank, dtype=torch.uint8) if image_size else None
    return [
        {
            "prompt_token_ids": list(range(200)),
            "text": "What is the sum of the two angles? " * 8,
            "label": "exact",
            "reference": str(index),
            "image": image,
        }
        for index in range(PROMPTS)
    ]


def gather_per_field(items: list[dict]) -> list[dict]:
    """One all_gather_object for each field. Collective over the default group."""
    columns = {}
    for field in FIELDS:
        parts: list = [None] * dist.get_world_size()
        dist.all_gather_object(parts, [item[field] for item in items])
        columns[field] = [value for part in parts for value in part]
    return [dict(zip(FIELDS, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def reduce_small() -> None:
    """Twenty all_reduce calls of four numbers. Collective over the default group."""
    value = torch.ones(4)
    for _ in range(20):
        dist.all_reduce(value)


def measure(rank: int, world_size: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds of (rft-dist, the obvious way) for each comparison. Collective over the default group."""
    metrics = {f"actor/some metric {index}": Mean(float(rank), 100) for index in range(KEYS)}
    results = {
        f"{KEYS} metrics: fused / one reduction per key": median_seconds(
            (partial(all_reduce_metrics, metrics), partial(metric_per_key, metrics)), rounds
        )
    }
    for size, name in ((0, "text only"), (224, "with a 224x224 image each")):
        items = prompts(rank, size)
        pair = (partial(gather_inputs, items, dist.group.WORLD), partial(gather_per_field, items))
        results[f"{PROMPTS} prompts, {name}: gather_inputs / all_gather_object per field"] = median_seconds(
            pair, rounds
        )
    results["20 small reductions: after a guard was left / before any"] = after_and_before(rounds)
    results["20 small reductions: under the guard / without"] = median_seconds(
        (reduce_small, reduce_small), rounds, (CollectiveGuard, nullcontext)
    )
    return results


def after_and_before(rounds: int) -> tuple[float, float]:
    """Unguarded calls after a guard was entered and left, and before any was. Collective over the default group."""
    before = median_seconds((reduce_small, reduce_small), rounds)[1]
    with CollectiveGuard():
        reduce_small()
    return median_seconds((reduce_small, reduce_small), rounds)[0], before


def main() -> None:
    """Prints one table for each world size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    for world_size in arguments.world_sizes:
        results = run_ranks(measure, world_size, arguments.rounds, timeout_seconds=600, guard=False)
        print(f"\n{world_size} gloo ranks, medians of {arguments.rounds} rounds on rank 0")
        print(f"{'':80} {'ours ms':>9} {'other ms':>9} {'ratio':>7}")
        for name, (ours, other) in results[0].items():
            print(f"{name:80} {ours * 1e3:9.3f} {other * 1e3:9.3f} {ours / other:7.3f}")


if __name__ == "__main__":
    main()
