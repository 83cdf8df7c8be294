"""Samples per second of the embedded engine against `transformers.generate`, in one process on the same requests.

    python benchmarks/hf_engine.py MODEL_FOLDER [--requests 64] [--new-tokens 64] [--threads 2]

Three loads, greedy in all so that both sides make the same tokens: prompts of mixed lengths with responses of mixed
lengths (each request has its own token budget, and transformers, which knows one budget, decodes all rows to the
longest), equal prompts with equal responses, and mixed prompts that all begin with the same 256 tokens, as worked
examples do. The rounds of both sides take turns; the best of each counts. On a
busy machine compare the processor seconds of one thread (`--threads 1`): they leave out the waiting.
"""

import argparse
import time

import torch

from rft_engines import GenerationRequest, HFEngine, SamplingParams


def mixed_requests(count, longest, vocabulary):
    """Prompts of 16 to 128 tokens with budgets of 4 to `longest`, most of them short."""
    generator = torch.Generator().manual_seed(0)
    requests = []
    for _ in range(count):
        length = int(torch.randint(16, 129, (), generator=generator))
        budget = 4 + int((longest - 4) * float(torch.rand((), generator=generator)) ** 2)
        ids = torch.randint(100, vocabulary, (length,), generator=generator)
        requests.append(GenerationRequest(tuple(ids.tolist()), max_new_tokens=budget))
    requests[0] = GenerationRequest(requests[0].prompt_token_ids, max_new_tokens=longest)
    return requests


def equal_requests(count, new_tokens, vocabulary):
    """Prompts of 64 tokens, all with the full budget."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(100, vocabulary, (count, 64), generator=generator).tolist()
    return [GenerationRequest(tuple(row), max_new_tokens=new_tokens) for row in ids]


def prefixed_requests(count, longest, vocabulary):
    """The mixed requests behind 256 tokens that are the same in all of them."""
    generator = torch.Generator().manual_seed(2)
    shared = tuple(torch.randint(100, vocabulary, (256,), generator=generator).tolist())
    return [
        GenerationRequest(shared + request.prompt_token_ids, max_new_tokens=request.max_new_tokens)
        for request in mixed_requests(count, longest, vocabulary)
    ]


def run_engine(engine, requests, new_tokens):
    sampling = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)
    return [sample.token_ids for sample in engine.generate(requests, sampling)]


def run_transformers(model, requests, new_tokens):
    width = max(len(request.prompt_token_ids) for request in requests)
    ids = torch.tensor([(0,) * (width - len(r.prompt_token_ids)) + r.prompt_token_ids for r in requests])
    mask = torch.tensor([[0] * (width - len(r.prompt_token_ids)) + [1] * len(r.prompt_token_ids) for r in requests])
    output = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return [tuple(row[width : width + r.max_new_tokens].tolist()) for row, r in zip(output, requests, strict=True)]


def compare(name, model, engine, requests, new_tokens, rounds):
    seconds = {"engine": [], "transformers": []}
    processor = {"engine": [], "transformers": []}
    answers = {}
    sides = {
        "engine": lambda: run_engine(engine, requests, new_tokens),
        "transformers": lambda: run_transformers(model, requests, new_tokens),
    }
    # The first forward reads the weights from the disk.
    run_engine(engine, requests[:2], 2)
    for _ in range(rounds):
        for side, run in sides.items():
            start, processor_start = time.perf_counter(), time.process_time()
            answers[side] = run()
            seconds[side].append(time.perf_counter() - start)
            processor[side].append(time.process_time() - processor_start)
    ours, theirs = answers["engine"], answers["transformers"]
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    tokens = sum(len(row) for row in ours)
    best = {side: min(values) for side, values in seconds.items()}
    busy = {side: min(values) for side, values in processor.items()}
    print(f"{name}: {len(requests)} requests, {tokens} tokens, {equal} of {len(requests)} responses equal")
    for unit, found in (("seconds", best), ("processor seconds", busy)):
        ours, theirs = found["engine"], found["transformers"]
        speed = f"{len(requests) / ours:.2f} samples and {tokens / ours:.0f} tokens a second"
        print(f"  {unit}: engine {ours:.2f} ({speed}), transformers {theirs:.2f}, {theirs / ours:.2f} times as fast")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a saved causal model")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--load", choices=("mixed", "equal", "prefix", "all"), default="all")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = HFEngine(options.model)
    model = engine.native
    vocabulary = model.config.vocab_size
    print(f"{options.model}: {type(model).__name__}, {model.dtype}, {options.threads} threads")
    builders = {"mixed": mixed_requests, "equal": equal_requests, "prefix": prefixed_requests}
    for load, build in builders.items():
        if options.load not in (load, "all"):
            continue
        requests = build(options.requests, options.new_tokens, vocabulary)
        compare(load, model, engine, requests, options.new_tokens, options.rounds)


if __name__ == "__main__":
    main()
