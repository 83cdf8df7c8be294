"""Run by torchrun: a sharded actor trains and updates the real vLLM; after each update both must agree."""

import importlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from rft_sync import (
    AdapterSource,
    BroadcastConfig,
    BroadcastManager,
    EngineNotReady,
    VerificationFailed,
    source_for,
    verify,
)

PREFIX = [(7 * place + 3) % 490 + 5 for place in range(192)]


def build_engine(folder, tp_size, lora):
    from vllm import LLM

    options = {"enable_lora": True, "max_lora_rank": 8} if lora else {}
    return LLM(
        folder,
        dtype="float32",
        tensor_parallel_size=tp_size,
        distributed_executor_backend="external_launcher",
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        seed=dist.get_rank() // tp_size,
        **options,
    )


def gap(llm, reference, lora_request=None):
    """Largest difference of log-probabilities, and whether greedy tokens agree, on cached and fresh prompts."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True, detokenize=False, seed=1)
    prompts = [[*PREFIX, 11, 12], [5, 9, 11]]
    worst, same = 0.0, True
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora_request)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        same = same and logits.argmax(-1).tolist() == tokens
        for place, token in enumerate(tokens):
            theirs = output.outputs[0].logprobs[place][token].logprob
            worst = max(worst, abs(theirs - float(log_probs[place, token])))
    return worst, same


def sharded(model, kind):
    if kind == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model, torch.optim.SGD(model.parameters(), lr=0.5)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    return engine, None


def train(model, optimizer, step):
    ids = torch.tensor([[3 + step, 40, 8, 21, 6, 7, 30]])
    loss = torch.log_softmax(model(ids).logits, -1)[0, :-1].gather(-1, ids[0, 1:, None]).mean()
    if optimizer is None:
        model.backward(loss)
        model.step()
        return
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def full_weights(folder, tp_size, kind):
    torch.manual_seed(0)
    llm = build_engine(folder, tp_size, lora=False)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    actor, optimizer = sharded(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), kind)
    whole = torch.optim.SGD(plain.parameters(), lr=0.5)
    manager = BroadcastManager.connect(actor, llm, BroadcastConfig(bucket_bytes=200_000))
    found = [gap(llm, plain)]
    for step in range(3):
        train(actor, optimizer, step)
        train(plain, whole, step)
        stale = gap(llm, plain)[0]
        before = torch.get_rng_state()
        report = manager.broadcast_to_engine()
        kept = torch.equal(before, torch.get_rng_state())
        found.append((*gap(llm, plain), stale, report.version, report.tensors_loaded, kept))
    return found


def answer(llm, lora_request=None):
    """20 greedy tokens behind the long prefix."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False, seed=1)
    outputs = llm.generate([{"prompt_token_ids": [*PREFIX, 30]}], sampling, use_tqdm=False, lora_request=lora_request)
    return list(outputs[0].outputs[0].token_ids)


def planted(llm, manager):
    """What verification names when one bit of the last rank's part of a factor is flipped, which is then undone."""
    layers = []
    llm.apply_model(lambda model: layers.append(model.lora_manager.modules["model.layers.1.self_attn.o_proj"]))
    bits = layers[0].lora_a_stacked[0].view(torch.int32)
    flipped = int(dist.get_rank() == dist.get_world_size() - 1)
    bits[0, 0, 0, 0] ^= flipped
    try:
        verify(manager.source, manager.receiver)
    except VerificationFailed as failure:
        return list(failure.names)
    finally:
        bits[0, 0, 0, 0] ^= flipped
    return []


def adapters(folder, tp_size, kind):
    """Adapter-only and merged updates of a LoRA actor agree with it; an adapter without its base is refused."""
    import peft

    llm = build_engine(folder, tp_size, lora=True)
    torch.manual_seed(4)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj"])
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    merged = BroadcastManager.connect(model, llm)
    alone = BroadcastManager(AdapterSource(model), merged.receiver)
    unadapted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base = BroadcastManager(source_for(unadapted), merged.receiver)
    found = []
    for _ in range(2):
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        merged.receiver.abort("the base weights were dropped in deep sleep")
        refused = ""
        try:
            alone.broadcast_to_engine()
        except EngineNotReady as error:
            refused = str(error)
        base.broadcast_to_engine()
        report = alone.broadcast_to_engine()
        named = planted(llm, alone)
        request = merged.receiver.lora_request
        by_adapter = (*gap(llm, model, request), answer(llm, request))
        loaded = sorted(llm.llm_engine.list_loras())
        merged.broadcast_to_engine()
        sent = (report.version, report.tensors_verified, named)
        found.append((by_adapter, (*gap(llm, model), answer(llm)), refused, sent, loaded))
    return found


def main(folder, tp_size, kind, output):
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    run = adapters if kind == "lora" else full_weights
    found = run(folder, tp_size, kind)
    Path(output, f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
