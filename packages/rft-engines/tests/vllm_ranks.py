"""Run by torchrun: ranks build vLLM together, generate uneven batches, and rank 0 of each writes what it got."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from rft_dist import ParallelLayout, build_rollout_groups
from rft_engines import EngineConfig, GenerationRequest, SamplingParams, create_engine, gather_and_generate


def main(folder, tp_size, output):
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = build_rollout_groups(ParallelLayout(world_size, tp_size), timeout_seconds=120)
    config = EngineConfig(
        kind="vllm", model_path=folder, dtype="float32", tp_size=tp_size, kv_cache_bytes=64 << 20, enable_sleep=True
    )
    engine = create_engine(config, groups=groups)
    found = {}
    for name, counts in (("uneven", (2, 1)), ("empty", (0, 2)), ("none", (0, 0))):
        requests = [GenerationRequest((5, 9, 11 + rank, 3 + place)) for place in range(counts[rank])]
        for kind, sampling in (
            ("greedy", SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)),
            ("sampled", SamplingParams(n=2, max_new_tokens=8, ignore_eos=True)),
        ):
            samples = gather_and_generate(engine, requests, sampling, groups)
            found[f"{name} {kind}"] = [
                [list(sample.prompt_token_ids), list(sample.token_ids), list(sample.log_probs)] for sample in samples
            ]
    same = [GenerationRequest((7, 7, 7))] * (1 if groups.layout.tp_rank == 0 else 0)
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    found["one prompt unseeded"] = [list(s.token_ids) for s in gather_and_generate(engine, same, sampling, groups)]
    engine.sleep()
    engine.wake_up()
    engine.close()
    Path(output, f"rank{rank}.json").write_text(json.dumps(found))
    groups.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
