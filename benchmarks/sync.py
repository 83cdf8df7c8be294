"""Bucketed gathers of rft-sync against one gather per parameter, on 2 gloo ranks.

    python benchmarks/sync.py [--ranks 2] [--repeats 5] [--kinds fsdp2 zero3]

Two models: 300 small tensors, where the number of collectives decides, and six large ones, where copies decide. Each
row gives the best of the repeats for both ways on the same model in the same run, their ratio, and the extra memory
that one bucketed gather of the whole model needs (high-water mark of the process, and as counted by the source).
"""

import argparse
import ctypes
import importlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rft_sync import build_manifest, source_for
from rft_sync.testing import spawn_ranks

BUCKET_BYTES = 32 << 20
SHAPES = {"300 small": [(32 + 32 * (i % 2), 48) for i in range(300)], "6 large": [(2048, 2048)] * 6}


class Tensors(nn.Module):
    """Parameters of given shapes, and a forward that uses them all."""

    def __init__(self, shapes):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self):
        return sum(weight.sum() for weight in self.weights)


def sharded(kind, shapes):
    model = Tensors(shapes)
    if kind == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # Its own all-reduce kernel is compiled for minutes; gloo does the work here.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def one_by_one(kind, model, use):
    """One collective per parameter."""
    if kind == "fsdp2":
        for parameter in model.parameters():
            use(parameter.full_tensor())
        return
    import deepspeed

    for parameter in model.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            use(parameter.data)


def bucketed(source, use):
    for bucket in build_manifest(source.metadata(), bucket_bytes=BUCKET_BYTES).buckets():
        with source.gather(bucket.names) as tensors:
            for tensor in tensors.values():
                use(tensor)


def resident_peak():
    """High-water mark of this process's memory since the last reset, in bytes."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def extra_memory(step):
    """Bytes that `step` needs above what the process holds, freed memory given back first."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident_peak()
    step()
    return resident_peak() - before


def seconds(step):
    """Seconds of `step`, ranks started together."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def compare(kind, name, repeats):
    """One row of the table."""
    model = sharded(kind, SHAPES[name])
    source = source_for(model)
    single_sums, bucket_sums = [], []
    one_by_one(kind, model, lambda tensor: single_sums.append(tensor.sum().item()))
    bucketed(source, lambda tensor: bucket_sums.append(tensor.sum().item()))
    assert single_sums == bucket_sums, "both ways must give the same tensors"
    source.release()
    extra = extra_memory(lambda: bucketed(source, lambda tensor: None))
    single, bucket = [], []
    for _ in range(repeats):  # in turns, so that a busy machine slows both alike
        single.append(seconds(lambda: one_by_one(kind, model, lambda tensor: None)))
        bucket.append(seconds(lambda: bucketed(source, lambda tensor: None)))
    return kind, name, min(single), min(bucket), extra, source.statistics().peak_extra_bytes


def measure(rank, kinds, repeats):
    return [compare(kind, name, repeats) for kind in kinds for name in SHAPES]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=["fsdp2", "zero3"], default=["fsdp2", "zero3"])
    arguments = parser.parse_args()
    rows = spawn_ranks(measure, arguments.ranks, arguments.kinds, arguments.repeats, timeout_seconds=900)[0]
    print(f"bucket {BUCKET_BYTES / 2**20:.0f} MiB")
    print("kind   tensors    one by one ms  bucketed ms  times faster  extra MiB  counted MiB")
    for kind, name, single, bucket, extra, counted in rows:
        ratio = f"{single * 1e3:13.1f} {bucket * 1e3:12.1f} {single / bucket:13.2f}"
        print(f"{kind:6} {name:10} {ratio} {extra / 2**20:10.1f} {counted / 2**20:12.1f}")


if __name__ == "__main__":
    main()
