"""Run by test_sglang_real.py, alone or under torchrun: `sglang_run.py MODE MODEL_FOLDER OUTPUT_FOLDER`.

Each rank writes what it found to OUTPUT_FOLDER/rankN.json. SGLang spawns processes that import this file.
"""

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from rft_dist import ParallelLayout, build_rollout_groups
from rft_engines import EngineConfig, GenerationRequest, HFEngine, SamplingParams, create_engine, gather_and_generate
from rft_engines.testing import EngineProbe, check_engine

CPU = {
    "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none",
    "disable_cuda_graph": True, "disable_overlap_schedule": True, "max_total_tokens": 4096,
    # Sleep keeps its states and frees nothing: the memory saver is a CUDA library.
    "enable_memory_saver": False,
}  # fmt: skip
PROMPTS = [(5, 9, 11), (40, 3, 8, 21, 6, 7, 30), (12,)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)


def start(folder, groups=None, tp_size=1):
    return create_engine(
        EngineConfig(
            kind="sglang", model_path=folder, dtype="float32", tp_size=tp_size, enable_sleep=True,
            memory_utilization=0.3, options=CPU,
        ),
        groups=groups,
    )  # fmt: skip


def children():
    return [child.pid for child in psutil.Process().children(recursive=True)]


def model_at(folder):
    return HFEngine(folder).native


def rows(samples):
    return [[list(sample.prompt_token_ids), list(sample.token_ids), list(sample.log_probs)] for sample in samples]


def reference_of(model):
    def reference(prompt, tokens, temperature):
        with torch.no_grad():
            log_probs = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0] / temperature, dim=-1)
        return [log_probs[len(prompt) - 1 + place, token].item() for place, token in enumerate(tokens)]

    return reference


def write_weights(engine, model):
    """SGLang's own update, on the rank that owns the engine."""
    native = engine.native
    if native is None:
        return
    weights = [(name, value.detach().clone()) for name, value in model.state_dict().items()]
    session = hasattr(native, "begin_weight_update")
    if session:
        native.begin_weight_update()
    answer = native.update_weights_from_tensor(weights)
    if session:
        native.end_weight_update()
    assert answer[0] if isinstance(answer, tuple) else answer.success, answer


def cached_tokens(engine, prompt):
    (answer,) = engine.native.generate(input_ids=[list(prompt)], sampling_params=[{"max_new_tokens": 1}])
    return answer["meta_info"]["cached_tokens"]


def prefix_report(engine, other):
    """Greedy answers and cached prefix tokens before and after an update to other weights, and back again."""
    prompt = tuple(3 + place % 90 for place in range(200))
    request = [GenerationRequest(prompt)]
    found = {"old": rows(engine.generate(request, GREEDY)), "cached before": cached_tokens(engine, prompt)}
    engine.begin_weight_update()
    write_weights(engine, other)
    engine.finish_weight_update(1)
    found["cached after"] = cached_tokens(engine, prompt)
    engine.reset_prefix_cache()
    found["new"] = rows(engine.generate(request, GREEDY))
    return found


def probe_of(folder, **changes):
    """SGLang's seeds need kernels that the CPU lacks."""
    model = model_at(folder)
    return EngineProbe(
        prompts=PROMPTS, vocab_size=model.config.vocab_size, reference=reference_of(model), tolerance=1e-4,
        load_weights=lambda engine: write_weights(engine, model), step_budget=False, truncation=False, seeded=False,
        **changes,
    )  # fmt: skip


def conform(folder):
    engine = start(folder)
    found = {"children": children()}
    sampled = SamplingParams(n=4, max_new_tokens=24, ignore_eos=True)
    found["sampled"] = rows(engine.generate([GenerationRequest((7,) * 12)], sampled))
    found["prefix"] = prefix_report(engine, model_at(Path(folder).parent / "other"))
    engine.begin_weight_update()
    write_weights(engine, model_at(folder))
    engine.finish_weight_update(0)
    found["checks"] = len(check_engine(engine, probe_of(folder)))
    return found


def in_groups(run, folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    groups = build_rollout_groups(ParallelLayout(dist.get_world_size(), 2), timeout_seconds=300)
    engine = start(folder, groups, tp_size=2)
    try:
        return {"owns": engine.native is not None, "children": children(), **run(engine, groups, folder)}
    finally:
        engine.close()
        groups.close()
        dist.destroy_process_group()


def ranks(engine, groups, folder):
    found = {}
    for name, counts in (("uneven", (2, 1)), ("empty", (0, 2)), ("none", (0, 0))):
        own = counts[groups.layout.tp_rank]
        requests = [GenerationRequest((5, 9, 11 + groups.layout.tp_rank, 3 + place)) for place in range(own)]
        found[name] = rows(gather_and_generate(engine, requests, GREEDY, groups))
    # One thread sleeps while another generates: two collectives at once on the group's one connection.
    found["checks"] = len(check_engine(engine, probe_of(folder, interruptible=False)))
    return found


def death(engine, groups, folder):
    requests = [GenerationRequest((5, 9, 11))]
    gather_and_generate(engine, requests, GREEDY, groups)
    killed = threading.Event()
    moment = []

    def kill():
        killed.wait(300)
        time.sleep(0.5)
        moment.append(time.monotonic())
        os.kill(engine.native.get_all_child_pids()[-1], signal.SIGKILL)

    if engine.native is not None:
        threading.Thread(target=kill, daemon=True).start()
    killed.set()
    errors = []
    for _ in range(2):
        try:
            gather_and_generate(engine, requests, SamplingParams(n=8, max_new_tokens=240, ignore_eos=True), groups)
        except Exception as error:  # noqa: BLE001 - reported to the test
            errors.append([type(error).__name__, str(error)])
        if moment:
            errors[-1].append(time.monotonic() - moment[0])
    return {"errors": errors}


def end_in(mode, folder, output):
    """A program that ends without close(): by an exception, or by a Ctrl-C that interrupts a long generation."""
    engine = start(folder)
    engine.generate([GenerationRequest(prompt) for prompt in PROMPTS], GREEDY)
    Path(output, "rank0.json").write_text(json.dumps({"children": children()}))
    if mode == "exception":
        raise ArithmeticError("the trainer failed")
    endless = SamplingParams(n=4, max_new_tokens=240, ignore_eos=True)
    while True:
        engine.generate([GenerationRequest(prompt) for prompt in PROMPTS], endless)


def main(mode, folder, output):
    torch.set_num_threads(1)
    # Where NCCL is installed SGLang takes it for a TP group, also on the CPU; without its library it takes gloo.
    os.environ["SGLANG_NCCL_SO_PATH"] = "nowhere"
    if mode in ("exception", "interrupt"):
        end_in(mode, folder, output)
    found = conform(folder) if mode == "conform" else in_groups({"ranks": ranks, "death": death}[mode], folder)
    Path(output, f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
