"""Run by test_sglang_sync.py: `sglang_sync.py KIND OUTPUT.json`. A module updates the real SGLang on the CPU.

SGLang spawns processes that import this file.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from rft_sync import BroadcastConfig, BroadcastManager, EngineRefused

CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.3,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "log_level": "error",
}
SHAPE = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPTS = [[(7 * place + 3) % 490 + 5 for place in range(96)], [5, 9, 11]]


def build(kind):
    import transformers

    torch.manual_seed(0)
    if kind == "moe":
        config = transformers.Qwen3MoeConfig(
            **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=32
        )
        return transformers.Qwen3MoeForCausalLM(config)
    config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=kind == "tied")
    return transformers.LlamaForCausalLM(config)


def gap(engine, model):
    """Largest difference of log-probabilities on the engine's greedy tokens, cached prefix included."""
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    outputs = engine.generate(input_ids=PROMPTS, sampling_params=sampling, return_logprob=True)
    worst = 0.0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        steps = output["meta_info"]["output_token_logprobs"]
        tokens = [step[1] for step in steps]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        log_probs = torch.log_softmax(logits, dim=-1)
        worst = max(worst, *(abs(step[0] - float(log_probs[i, step[1]])) for i, step in enumerate(steps)))
    return worst


def perturb(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)


def main(kind, output):
    import sglang

    model = build(kind)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = sglang.Engine(model_path=folder, **CPU)
    formats = []
    send = engine.update_weights_from_tensor

    def noted(named_tensors, **options):
        formats.append(options.get("load_format"))
        return send(named_tensors, **options)

    engine.update_weights_from_tensor = noted
    manager = BroadcastManager.connect(model, engine, BroadcastConfig(bucket_bytes=200_000))
    found = {"start": gap(engine, model), "updates": []}
    for version in range(3):
        perturb(model, version)
        stale = gap(engine, model)
        report = manager.broadcast_to_engine()
        found["updates"].append(
            [stale, gap(engine, model), report.version, report.tensors_loaded, report.tensors_verified]
        )
    found["formats"] = sorted({str(kind) for kind in formats})
    sys.modules["sglang.srt.weight_sync.tensor_bucket"] = None  # a release that has it elsewhere: pairs are sent
    formats.clear()
    perturb(model, 9)
    manager.broadcast_to_engine()
    found["pairs"] = [sorted({str(kind) for kind in formats}), gap(engine, model)]
    found["sessions"] = hasattr(engine, "begin_weight_update")
    begin = manager.receiver._begin
    manager.receiver._begin = lambda: None  # as a caller who knows no sessions
    try:
        manager.broadcast_to_engine()
        found["without session"] = ""
    except EngineRefused as error:
        found["without session"] = str(error)
    manager.receiver._begin = begin
    found["repaired"] = [manager.broadcast_to_engine().version, gap(engine, model)]
    Path(output).write_text(json.dumps(found))
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
