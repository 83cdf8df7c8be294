"""Actors and engines of `sync_gpu.py`: shapes with random weights, vLLM in this process, a module for the rehearsal."""

import statistics

import torch

SHAPES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "heads": 4, "kv": 2, "vocab": 512},
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "heads": 12,
        "kv": 2,
        "vocab": 151936,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "heads": 28,
        "kv": 4,
        "vocab": 152064,
    },
}
PROMPTS = [[(31 * place + 7 * row) % 400 + 50 for place in range(24)] for row in range(8)]


def write_config(size, folder):
    """A folder that holds nothing but the configuration of the shape."""
    from transformers import Qwen2Config

    shape = dict(SHAPES[size])
    heads, kv, vocabulary = shape.pop("heads"), shape.pop("kv"), shape.pop("vocab")
    config = Qwen2Config(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=size != "7b",
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)


class VLLM:
    """vLLM in this process."""

    def __init__(self, folder, device):
        from vllm import LLM

        options = {"enforce_eager": True} if device == "cpu" else {"kv_cache_memory_bytes": 4 << 30}
        self.llm = LLM(
            str(folder),
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            distributed_executor_backend="external_launcher",
            max_model_len=1024,
            max_num_seqs=64,
            enable_prefix_caching=True,
            seed=0,
            **options,
        )
        found = []
        self.llm.apply_model(found.append)
        self.model = found[0]
        self.native = self.llm

    def load_weights(self, pairs):
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self.llm.llm_engine.vllm_config):
            self.model.load_weights(pairs)

    def log_probs(self, prompts):
        """Greedy tokens and their log-probabilities, per prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False, seed=1)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = []
        for output in self.llm.generate(inputs, sampling, use_tqdm=False):
            tokens = list(output.outputs[0].token_ids)
            found.append((tokens, [output.outputs[0].logprobs[i][token].logprob for i, token in enumerate(tokens)]))
        return found


class Module:
    """A second module as the engine, for the rehearsal."""

    def __init__(self, folder, device):
        self.model = build_actor(folder, torch.bfloat16, device, seed=9)
        self.native = self.model

    def load_weights(self, pairs):
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in pairs:
                own[name].copy_(tensor)

    def log_probs(self, prompts):
        found = []
        for prompt in prompts:
            tokens, values = [], []
            for _ in range(4):
                with torch.no_grad():
                    logits = self.model(torch.tensor([prompt + tokens], device=self.model.device)).logits[0, -1]
                tokens.append(int(logits.argmax()))
                values.append(float(torch.log_softmax(logits.float(), -1)[tokens[-1]]))
            found.append((tokens, values))
        return found


def build_actor(folder, dtype, device, seed):
    """Random weights of the shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    model.tie_weights()
    return model.eval()


def sharded(model, device):
    """FSDP2 on this one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gap(engine, actor):
    """Mean and largest difference of log-probabilities between engine and actor on the engine's greedy tokens."""
    differences = []
    for prompt, (tokens, theirs) in zip(PROMPTS, engine.log_probs(PROMPTS), strict=True):
        device = next(actor.parameters()).device
        with torch.no_grad():
            logits = actor(torch.tensor([prompt + tokens], device=device)).logits[0, len(prompt) - 1 : -1]
        mine = torch.log_softmax(logits.float(), -1).gather(-1, torch.tensor(tokens, device=device)[:, None])[:, 0]
        differences += [abs(a - b) for a, b in zip(theirs, mine.tolist(), strict=True)]
    return {"mean": statistics.mean(differences), "max": max(differences)}
