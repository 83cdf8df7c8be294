"""What an engine says it holds, by kind and state."""

from types import SimpleNamespace

import torch
from torch import nn

from rft_engines import GenerationRequest, HFEngine, SamplingParams
from rft_engines.testing import ScriptedEngine
from rft_engines.vllm.held import read_memory

WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graphs"


class Holding(ScriptedEngine):
    def _held(self):
        return {WEIGHTS: 100, CACHE: 50, GRAPHS: 7}


def holding(**options):
    return Holding.answering({}, vocab_size=4, eos_token_id=3, **options)


def test_what_sleeps_is_not_held():
    engine = holding()
    assert engine.memory() == {WEIGHTS: 100, CACHE: 50, GRAPHS: 7}
    for level in (1, 2):
        engine.sleep(level)
        # Graphs stay by this engine's contract.
        assert engine.memory() == {WEIGHTS: 0, CACHE: 0, GRAPHS: 7}
        engine.wake_up(["weights"])
        assert engine.memory() == {WEIGHTS: 100, CACHE: 0, GRAPHS: 7}
        engine.wake_up()
        assert engine.memory() == {WEIGHTS: 100, CACHE: 50, GRAPHS: 7}
        engine.begin_weight_update()
        engine.finish_weight_update(1)
    engine.close()
    assert engine.memory() == {}


def test_an_engine_that_keeps_its_weights_and_drops_its_graphs():
    from rft_engines import sleep_contract

    engine = holding(contract=sleep_contract("sglang"))
    engine.sleep(1)
    assert engine.memory() == {WEIGHTS: 100, CACHE: 0, GRAPHS: 0}
    engine.wake_up()
    assert engine.memory()[GRAPHS] == 7


def test_the_embedded_engine_counts_the_cache_of_its_largest_wave_once(model):
    config = model.config
    engine = HFEngine(model, max_rows=4)
    assert engine.memory() == {WEIGHTS: parameter_bytes(model), CACHE: 0}
    requests = [GenerationRequest((5, 6, 7), seed=1), GenerationRequest((8,), seed=2)]
    engine.generate(requests, SamplingParams(n=2, max_new_tokens=5, ignore_eos=True))
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Keys and values of every layer: 4 rows of 3 prompt columns and room for 5 new ones, fp32.
    cache = 2 * config.num_hidden_layers * 4 * heads * (3 + 5) * width * 4
    assert engine.memory() == {WEIGHTS: parameter_bytes(model), CACHE: cache}
    # It is gone: only the call since the last reading counts.
    assert engine.memory()[CACHE] == 0


def parameter_bytes(model):
    return sum({p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}.values())


def test_a_vllm_worker_is_read_without_vllm():
    network = nn.Linear(4, 4, bias=False)
    network.tied = nn.Linear(4, 4, bias=False)
    network.tied.weight = network.weight
    shared = torch.zeros(2, 8)
    runner = SimpleNamespace(get_model=lambda: network, kv_caches=[shared[0], [shared[1], torch.zeros(4)]])
    found = {}
    read_memory(found, SimpleNamespace(model_runner=runner))
    # 16 weights once; 16 and 4 numbers of cache.
    assert found == {WEIGHTS: 64, CACHE: 80}
    read_memory(found, SimpleNamespace(worker=SimpleNamespace(model_runner=runner, cudagraph_memory_estimate=9)))
    assert found[GRAPHS] == 9
