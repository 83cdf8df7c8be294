"""A module with the fused, sliced and padded parameters and the loaders of a vLLM model, and its engine's calls."""

from types import SimpleNamespace

import torch
from torch import nn

from rft_sync import BroadcastConfig, BroadcastManager, ModuleSource
from rft_sync.receivers.vllm import VLLMReceiver

HEADS, KV_HEADS, DIM, WIDTH, ROWS, PADDED = 4, 2, 2, 8, 10, 12


class Trainer(nn.Module):
    """Checkpoint names of a small decoder layer."""

    def __init__(self, seed=0, tied=False):
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(ROWS, WIDTH)
        self.model.q_proj = nn.Linear(WIDTH, HEADS * DIM)
        self.model.k_proj = nn.Linear(WIDTH, KV_HEADS * DIM)
        self.model.v_proj = nn.Linear(WIDTH, KV_HEADS * DIM)
        self.model.o_proj = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.model.gate_proj = nn.Linear(WIDTH, 6, bias=False)
        self.model.up_proj = nn.Linear(WIDTH, 6, bias=False)
        self.model.norm = nn.LayerNorm(WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


class EngineModel(nn.Module):
    """What a vLLM model is to its loader: fused, sliced and padded parameters with weight loaders."""

    def __init__(self, rank=0, world=1, tied=False, loader="plain"):
        super().__init__()
        self.rank, self.world, self.loader = rank, world, loader
        split = lambda rows, columns: nn.Parameter(torch.full((rows, columns), -7.0), requires_grad=False)  # noqa: E731
        qkv = (HEADS + 2 * KV_HEADS) * DIM // world
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = split(PADDED // world, WIDTH)
        self.qkv_proj, self.o_proj, self.gate_up_proj = nn.Module(), nn.Module(), nn.Module()
        self.qkv_proj.weight = split(qkv, WIDTH)
        self.qkv_proj.bias = nn.Parameter(torch.zeros(qkv), requires_grad=False)
        self.o_proj.weight = split(WIDTH, HEADS * DIM // world)
        self.gate_up_proj.weight = split(12 // world, WIDTH)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.lm_head = nn.Module()
        self.lm_head.weight = self.embed_tokens.weight if tied else split(PADDED // world, WIDTH)

    def _rows(self, tensor, world_rows):
        return tensor.narrow(0, self.rank * world_rows, world_rows)

    def _vocabulary(self, parameter, tensor):
        rows = PADDED // self.world
        begin = self.rank * rows
        mine = tensor[begin : begin + rows]
        parameter.data[: mine.shape[0]].copy_(mine)
        parameter.data[mine.shape[0] :].fill_(0)

    def load_weights(self, pairs):
        done = set()
        parameters = dict(self.named_parameters(remove_duplicate=False))
        q, kv = HEADS * DIM // self.world, KV_HEADS * DIM // self.world
        starts = {"q_proj": (0, q), "k_proj": (q, kv), "v_proj": (q + kv, kv)}
        for full_name, tensor in pairs:
            name = full_name.removeprefix("model.")
            part, _, kind = name.partition(".")
            if part in starts:
                start, rows = starts[part]
                target = f"qkv_proj.{kind}"
                piece = self._rows(tensor, rows)
                if self.loader == "computed" and part == "v_proj":
                    piece = piece * 1.0
                parameters[target].data.narrow(0, start, rows).copy_(piece)
            elif part in ("gate_proj", "up_proj"):
                rows = 6 // self.world
                target = f"gate_up_proj.{kind}"
                parameters[target].data[rows * (part == "up_proj") :][:rows].copy_(self._rows(tensor, rows))
            elif part == "o_proj":
                columns = HEADS * DIM // self.world
                target = name
                parameters[target].data.copy_(tensor.narrow(1, self.rank * columns, columns))
            elif part in ("embed_tokens", "lm_head"):
                target = name
                self._vocabulary(parameters[target], tensor)
            else:
                target = name
                if self.loader == "gap":
                    parameters[target].data[1:].copy_(tensor[1:])
                elif self.loader == "twice":
                    parameters[target].data.copy_(tensor)
                    parameters[target].data[:2].copy_(tensor[2:4])
                elif self.loader == "host":
                    for index in range(len(tensor)):
                        parameters[target].data[index].fill_(tensor[index].item())
                else:
                    parameters[target].data.copy_(tensor)
            done.add(target)
        return done


class FakeLLM:
    """The calls of `vllm.LLM` that the receiver makes."""

    def __init__(self, model, lora=False):
        self.model, self.unfinished, self.tags, self.resets, self.refuse = model, False, set(), [], False
        config = SimpleNamespace(quantization=None, dtype=torch.float32, get_vocab_size=lambda: ROWS)
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=config, lora_config=object() if lora else None),
            has_unfinished_requests=lambda: self.unfinished,
            is_sleeping=lambda: bool(self.tags),
            reset_encoder_cache=lambda: self.resets.append("encoder"),
            set_weight_version=lambda version: self.resets.append(version),
            engine_core=SimpleNamespace(
                engine_core=SimpleNamespace(model_executor=SimpleNamespace(sleeping_tags=self.tags))
            ),
        )

    def apply_model(self, function):
        torch.rand(3)  # engines draw from the trainer's generators
        return [function(self.model)]

    def collective_rpc(self, function):
        runner = SimpleNamespace(reset_lora_state=lambda: self.resets.append("lora"))
        return [function(SimpleNamespace(model_runner=runner))]

    def reset_prefix_cache(self):
        self.resets.append("prefix")
        return not self.refuse

    def reset_mm_cache(self):
        self.resets.append("multimodal")

    def wake_up(self, tags):
        self.tags.difference_update(tags)


def expected_state(trainer, rank, world, tied=False):
    """Slices by hand."""
    model = EngineModel(rank, world, tied)
    model.load_weights(trainer.state_dict().items())
    return model.state_dict()


def connect(trainer, llm, **config):
    receiver = VLLMReceiver(llm, live_layout=True)
    return BroadcastManager(ModuleSource(trainer), receiver, BroadcastConfig(bucket_bytes=300, **config))
