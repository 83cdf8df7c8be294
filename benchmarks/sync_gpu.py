"""Weight sync on one card, against one flat device copy of the same bytes and against the engine's own loader.

    python benchmarks/sync_gpu.py --out DIR                     the shape of Qwen2.5-1.5B
    python benchmarks/sync_gpu.py --out DIR --sizes 1.5b 7b     the shape of Qwen2.5-7B too
    python benchmarks/sync_gpu.py --out DIR --sizes tiny --engine module    a rehearsal without vLLM and without a card

Random weights, vLLM in this process with CUDA graphs on. Actors: a plain module and FSDP2 on one rank, each in bf16 and
with fp32 masters. For every actor, in one run: the floor (one flat copy, or one flat cast, of the same elements), the
recorded copies alone (as a graph with 1 to 8 branches, and as one multi-tensor copy), the whole of
`broadcast_to_engine` with verification off, by sample and of everything, the fingerprint pass alone, and the engine's
`load_weights`. Before each way is timed the engine's weights are set to NaN; afterwards they must equal, bit by bit,
what the engine's loader writes. Medians; device time by events, whole calls by the wall clock with the device
synchronised.
"""

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sync_gpu_models import SHAPES, VLLM, Module, build_actor, gap, sharded, write_config

from rft_sync import BroadcastConfig, BroadcastManager, Piece, UnsupportedCombination, receiver_for, source_for
from rft_sync.receivers.replay import Replay
from rft_sync.scan import Scanner


class Clock:
    """Medians over many repeats."""

    def __init__(self, device, repeats):
        self.on_card = device == "cuda"
        self.repeats = repeats

    def wait(self):
        if self.on_card:
            torch.cuda.synchronize()

    def once(self, step):
        """Wall milliseconds of one synchronised call, and the peak of memory above what is held."""
        gc.collect()
        self.wait()
        held = torch.cuda.memory_allocated() if self.on_card else 0
        if self.on_card:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        self.wait()
        wall = (time.perf_counter() - begin) * 1e3
        return {"ms": wall, "extra_mib": (torch.cuda.max_memory_allocated() - held) / 2**20 if self.on_card else 0.0}

    def call(self, step):
        """Wall milliseconds of a synchronised call, median; and the largest extra memory of any."""
        runs = [self.once(step) for _ in range(self.repeats + 2)][2:]
        return {
            "ms": statistics.median(run["ms"] for run in runs),
            "best_ms": min(run["ms"] for run in runs),
            "extra_mib": max(run["extra_mib"] for run in runs),
        }

    def device(self, step):
        """Milliseconds on the device by events, median."""
        if not self.on_card:
            return self.call(step)
        times = []
        for _ in range(self.repeats + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return {"ms": statistics.median(times[3:]), "best_ms": min(times[3:])}


def poison(model):
    """Every floating-point parameter of the engine becomes NaN."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel():
                parameter.fill_(float("nan"))


def content(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.numel()}


def must_equal(model, expected, what):
    found = dict(model.named_parameters())
    wrong = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not wrong, f"after {what} the engine differs from its own loader in {wrong[:5]} ({len(wrong)} in all)"


def flat_copy(clock, numel, dtype, device):
    """The floor: as many elements in one piece, copied, or cast, once."""
    source = torch.randn(numel, dtype=dtype, device=device)
    target = torch.empty(numel, dtype=torch.bfloat16, device=device)
    return clock.device(lambda: target.copy_(source))


def measure_calls(clock, source, receiver, engine, expected):
    """The whole call in the three modes of verification."""
    rows = {}
    for verify in ("off", "rotating", "all"):
        manager = BroadcastManager(source, receiver, BroadcastConfig(verify=verify))
        manager.broadcast_to_engine()  # the first verifies everything in every mode but off
        poison(engine.model)
        report = manager.broadcast_to_engine()
        must_equal(engine.model, expected, f"broadcast_to_engine, verify={verify}")
        rows[f"call verify={verify}"] = clock.call(manager.broadcast_to_engine) | {
            "verified": report.tensors_verified,
            "phases_ms": {name: value * 1e3 for name, value in report.seconds.items()},
        }
    return rows


def measure_replay(clock, replay, engine, expected):
    """The copies alone, as they are used and in other forms."""
    rows = {}

    def checked(name, step):
        poison(engine.model)
        step()
        must_equal(engine.model, expected, name)
        rows[name] = clock.device(step)

    checked("replay", replay.run)
    pairs = replay.pairs
    targets, sources = [target for _, target in pairs], [source for source, _ in pairs]
    with torch.no_grad():
        checked("one multi-tensor copy", lambda: torch._foreach_copy_(targets, sources))
    for branches in (1, 2, 4, 8) if clock.on_card else ():
        other = Replay(pairs, branches=branches)
        other.run()  # copies; the next run captures
        checked(f"graph of {branches} branches", other.run)
        rows[f"graph of {branches} branches"]["captured"] = other.captured
        del other
    scanner = Scanner()
    pieces = [Piece(source, target.dtype) for source, target in pairs]
    live = [Piece(target, target.dtype) for target in targets]
    rows["fingerprints of the sent"] = clock.device(lambda: scanner.scan(pieces, finite=True))
    rows["fingerprints of the live"] = clock.device(lambda: scanner.scan(live))
    return rows


def measure_actor(clock, engine, actor, dtype, device):
    """All rows of one actor."""
    receiver = receiver_for(engine.native)
    source = source_for(actor, dtype=torch.bfloat16)
    state = source.live()
    assert state is not None, "the actor's tensors are whole on this rank"
    names = {meta.name: state[meta.alias_of or meta.name] for meta in source.metadata()}
    numel = sum(tensor.numel() for tensor in state.values())
    rows = {}
    rows["floor"] = flat_copy(clock, numel, dtype, device)
    first = BroadcastManager(source, receiver)
    rows["first sync"] = clock.once(first.broadcast_to_engine)
    rows["second sync"] = clock.once(first.broadcast_to_engine)
    rows["third sync"] = clock.once(first.broadcast_to_engine)
    expected = content(engine.model)
    loads = getattr(receiver, "plan_refusal", "") == ""
    if loads:  # the reference of all others: what the engine's own loader writes
        poison(engine.model)
        engine.load_weights(iter(names.items()))
        must_equal(engine.model, expected, "load_weights")
        rows["engine load_weights"] = clock.call(lambda: engine.load_weights(iter(names.items())))
    rows |= measure_calls(clock, source, receiver, engine, expected)
    if receiver.replay is not None:
        rows |= measure_replay(clock, receiver.replay, engine, expected)
    first.broadcast_to_engine()
    rows["log-prob gap"] = gap(engine, actor)
    graph = receiver.replay is not None and receiver.replay.captured
    reasons = [getattr(receiver, "plan_refusal", ""), receiver.replay.refusal if receiver.replay is not None else ""]
    return rows | {"bytes": numel * 2, "tensors": len(names), "graph": graph, "refusals": reasons}


def measure_sharing(clock, engine, actor):
    """Training in the engine's memory: an update copies nothing."""
    manager = BroadcastManager(
        source_for(actor, dtype=torch.bfloat16), receiver_for(engine.native), BroadcastConfig(share_weights=True)
    )
    held = torch.cuda.memory_allocated() if clock.on_card else 0
    manager.broadcast_to_engine()
    gc.collect()
    saved = held - torch.cuda.memory_allocated() if clock.on_card else 0
    before = gap(engine, actor)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    row = clock.call(manager.broadcast_to_engine)
    off = BroadcastManager(manager.source, manager.receiver, BroadcastConfig(verify="off", check_finite=False))
    bare = clock.call(off.broadcast_to_engine)
    return {"call": row, "call unchecked": bare, "saved_mib": saved / 2**20, "gap": [before, gap(engine, actor)]}


def free_port():
    """A port that nothing on this machine uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(size, engine_kind, device, repeats, out):
    """All actors of one size; writes the JSON file."""
    folder = out / f"model-{size}"
    write_config(size, folder)
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ["MASTER_PORT"] = str(free_port())
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    begin = time.perf_counter()
    engine = (VLLM if engine_kind == "vllm" else Module)(folder, device)
    result = {"size": size, "engine_start_s": time.perf_counter() - begin, "hardware": hardware(device), "actors": {}}
    clock = Clock(device, repeats)
    for kind in ("plain", "fsdp2"):
        for dtype in (torch.bfloat16, torch.float32):
            name = f"{kind} {'bf16' if dtype is torch.bfloat16 else 'fp32 masters'}"
            actor = build_actor(folder, dtype, device, seed=len(result["actors"]))
            actor = sharded(actor, device) if kind == "fsdp2" else actor
            result["actors"][name] = measure_actor(clock, engine, actor, dtype, device)
            (out / f"sync-{size}.json").write_text(json.dumps(result, indent=1))
            print(f"{size} {name}: done after {time.perf_counter() - begin:.0f} s", flush=True)
            del actor
            gc.collect()
    try:
        actor = build_actor(folder, torch.bfloat16, device, seed=7)
        result["shared memory"] = measure_sharing(clock, engine, actor)
    except UnsupportedCombination as error:
        result["shared memory"] = {"refused": str(error)}
    (out / f"sync-{size}.json").write_text(json.dumps(result, indent=1))
    sys.stdout.flush()
    os._exit(0)  # all is measured and written; the engine and NCCL would take their time to agree on an end


def hardware(device):
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    try:
        import vllm

        versions["vllm"] = vllm.__version__
    except ImportError:
        pass
    return {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"} | versions


def table(result):
    """The short table of one size, and the goals."""
    print(f"\n{result['size']} shape on {result['hardware']}, engine started in {result['engine_start_s']:.0f} s")
    print(f"{'actor':18} {'way':26} {'ms':>9} {'x floor':>8} {'extra MiB':>10}")
    for actor, rows in result["actors"].items():
        floor = rows["floor"]["ms"]
        for way, row in rows.items():
            if isinstance(row, dict) and "ms" in row:
                extra = f"{row['extra_mib']:10.0f}" if "extra_mib" in row else f"{'':10}"
                print(f"{actor:18} {way:26} {row['ms']:9.3f} {row['ms'] / floor:8.2f} {extra}")
        mean, largest = rows["log-prob gap"]["mean"], rows["log-prob gap"]["max"]
        print(f"{actor:18} log-prob gap mean {mean:.5f} max {largest:.4f}, graph {rows['graph']} {rows['refusals']}")
    for actor, rows in result["actors"].items():
        floor, load = rows["floor"]["ms"], rows.get("engine load_weights", {}).get("ms")
        replay, off = rows.get("replay", {}).get("ms"), rows["call verify=off"]["ms"]
        line = [f"{rows['bytes'] / 2**30:.2f} GiB in {rows['tensors']} names"]
        if replay:
            line.append(f"replay {replay / floor:.2f} x floor, {rows['bytes'] / replay / 1e6:.0f} GB/s")
        if replay and load:
            line.append(f"load_weights {load / replay:.1f} x replay, {load / off:.1f} x whole call")
        line += [
            f"verify={mode} +{(rows[f'call verify={mode}']['ms'] - off) / floor:.2f} floors"
            for mode in ("rotating", "all")
        ]
        print(f"{actor:18} {'; '.join(line)}")
    print(f"shared memory: {json.dumps(result.get('shared memory'))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--sizes", nargs="+", choices=sorted(SHAPES), default=["1.5b"])
    parser.add_argument("--engine", choices=["vllm", "module"], default="vllm")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--here", action="store_true", help="run the one size in this process (the script's own use)")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.here:
        run(arguments.sizes[0], arguments.engine, device, arguments.repeats, arguments.out)
        return
    failed = []
    for size in arguments.sizes:  # each in a process of its own, so that each starts with an empty card
        options = [
            "--out",
            arguments.out,
            "--sizes",
            size,
            "--engine",
            arguments.engine,
            "--repeats",
            arguments.repeats,
        ]
        command = [sys.executable, __file__, *map(str, options), "--here"]
        settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
        if subprocess.run(command, env={**settings, **os.environ}, check=False).returncode:
            failed.append(size)
    for size in arguments.sizes:
        path = arguments.out / f"sync-{size}.json"
        if path.is_file():
            table(json.loads(path.read_text()))
    if failed:
        sys.exit(f"failed: {failed}; what was measured before is in {arguments.out}")


if __name__ == "__main__":
    main()
