"""SGLangEngine against a scripted double; the double's signatures against the real Engine where it is installed."""

import ast
import importlib.util
import inspect
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from rft_dist import ParallelLayout, build_rollout_groups
from rft_dist.testing import run_ranks
from rft_engines import (
    EngineConfig,
    EngineDiedError,
    EngineStartError,
    GenerationRequest,
    SamplingParams,
    UnsupportedCombinationError,
    gather_and_generate,
)
from rft_engines.sglang import SGLangEngine
from rft_engines.sglang.process import _is_alive
from rft_engines.testing import EngineProbe, check_engine

sys.path.insert(0, str(Path(__file__).parent))
import sglang_double

PROMPTS = [(5, 9, 11), (40, 3, 8, 21, 6, 7, 30), (12,)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    facts = {
        "vocab_size": sglang_double.VOCABULARY,
        "max_position_embeddings": sglang_double.POSITIONS,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(facts))
    return str(path)


def sglang_config(folder, **changes):
    return EngineConfig(**({"kind": "sglang", "model_path": folder, "enable_sleep": True} | changes))


def reference(prompt, tokens, temperature):
    values = []
    for place, token in enumerate(tokens):
        scores = torch.tensor(sglang_double.logits(prompt, tokens[:place])) / temperature
        values.append(torch.log_softmax(scores, dim=0)[token].item())
    return values


def test_sglang_engine_conforms(folder):
    engine = SGLangEngine(sglang_config(folder), engine_class=sglang_double.Engine)
    child = engine.native.child.pid
    probe = EngineProbe(
        prompts=PROMPTS, vocab_size=97, reference=reference, tolerance=1e-5, step_budget=False, truncation=False
    )
    assert len(check_engine(engine, probe)) == 40
    assert not _is_alive(child), "no orphans"


def test_the_process_is_left_as_it_was(folder, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "0")
    before = multiprocessing.get_start_method(allow_none=True), torch.get_rng_state(), signal.getsignal(signal.SIGQUIT)
    engine = SGLangEngine(sglang_config(folder, max_model_len=64, max_rows=8), engine_class=sglang_double.Engine)
    assert "TORCHELASTIC_USE_AGENT_STORE" not in engine.native.environment
    assert "RANK" not in engine.native.environment
    # Else pictures of an earlier call are seen with the weights of then.
    assert engine.native.environment["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert "SGLANG_VLM_CACHE_SIZE_MB" not in os.environ
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    # SGLang gives six positions of the context to no prompt.
    assert (engine.native.arguments["context_length"], engine.max_model_len) == (70, 64)
    assert engine.native.arguments["max_running_requests"] == 8
    assert engine.native.arguments["nccl_port"] > 1023
    engine.close()
    assert multiprocessing.get_start_method(allow_none=True) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert signal.getsignal(signal.SIGQUIT) is before[2]


def test_sleep_releases_what_the_contract_says(folder):
    engine = SGLangEngine(sglang_config(folder), engine_class=sglang_double.Engine)
    engine.sleep()
    assert engine.native.released == {"kv_cache", "cuda_graph"}
    engine.wake_up(["weights"])
    assert engine.native.released == {"kv_cache", "cuda_graph"}
    engine.wake_up(["kv_cache"])
    engine.sleep(2)
    assert engine.native.released == {"kv_cache", "cuda_graph", "weights"}
    engine.begin_weight_update()
    assert engine.native.released == {"kv_cache", "cuda_graph"}
    engine.finish_weight_update(1)
    engine.wake_up()
    assert engine.native.released == set()
    engine.close()


def test_unsupported_wishes_are_refused_by_name(folder):
    engine = SGLangEngine(sglang_config(folder, enable_sleep=False), engine_class=sglang_double.Engine)
    requests = [GenerationRequest((5,))]
    with pytest.raises(UnsupportedCombinationError, match=r"'sglang' and top_p=0\.5"):
        engine.generate(requests, SamplingParams(top_p=0.5))
    with pytest.raises(UnsupportedCombinationError, match="enable_sleep"):
        engine.sleep()
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.generate(requests, SamplingParams(stop=("x",)))
    with pytest.raises(UnsupportedCombinationError, match="'sglang' and images"):
        engine.generate([GenerationRequest((5,), images=("a",))], GREEDY)
    engine.close()
    with pytest.raises(UnsupportedCombinationError, match="kv_cache_bytes"):
        SGLangEngine(sglang_config(folder, kv_cache_bytes=1), engine_class=sglang_double.Engine)


def test_no_more_room_is_promised_than_the_engine_has(folder, caplog):
    engine = SGLangEngine(sglang_config(folder, max_model_len=126), engine_class=sglang_double.Engine)
    assert (engine.native.arguments["context_length"], engine.max_model_len) == (128, 122)
    assert "takes 122 tokens of prompt and response, 126 were asked for" in caplog.text
    engine.close()


def test_end_ids_of_the_generation_config_count(folder, tmp_path):
    (tmp_path / "config.json").write_text(Path(folder, "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2], "temperature": 0.3}))
    engine = SGLangEngine(sglang_config(str(tmp_path)), engine_class=sglang_double.Engine)
    assert engine.eos_token_ids == (2, 7)
    engine.close()


def test_a_dead_engine_is_noticed_while_it_is_waited_for(folder):
    engine = SGLangEngine(sglang_config(folder), engine_class=sglang_double.Engine)
    engine.native.seconds_per_step = 3600
    killer = threading.Timer(0.5, engine.native.child.kill)
    killer.start()
    with pytest.raises(EngineDiedError, match="has ended"):
        engine.generate([GenerationRequest((5,))], GREEDY)
    with pytest.raises(EngineDiedError):
        engine.generate([GenerationRequest((5,))], GREEDY)
    engine.close()


def test_images_travel_with_each_sample(folder, tmp_path):
    facts = json.loads(Path(folder, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": facts, "vision_config": {}}))
    engine = SGLangEngine(sglang_config(str(tmp_path)), engine_class=sglang_double.Engine)
    requests = [GenerationRequest((5,), images=("a", "b")), GenerationRequest((6,))]
    engine.generate(requests, SamplingParams(n=2, max_new_tokens=1))
    (call,) = engine.native.calls
    assert call["image_data"] == [["a", "b"], ["a", "b"], None, None]
    assert call["input_ids"] == [[5], [5], [6], [6]]
    engine.close()


def on_rank(rank, world_size, folder, counts, mode=""):
    groups = build_rollout_groups(ParallelLayout(world_size, 2), timeout_seconds=60)
    logging.disable(logging.WARNING)

    class Engine(sglang_double.Engine):
        fail_to_start = mode == "no start"

    try:
        engine = SGLangEngine(sglang_config(folder, tp_size=2), groups=groups, engine_class=Engine)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error)
    assert (engine.native is None) == (rank != 0)
    requests = [GenerationRequest((5 + rank, 9, 11 + place)) for place in range(counts[rank])]
    if mode == "death" and rank == 0:
        engine.native.seconds_per_step = 3600
        threading.Timer(0.3, engine.native.child.kill).start()
    try:
        samples = gather_and_generate(engine, requests, SamplingParams(n=2, max_new_tokens=3), groups)
        engine.sleep(2)
        engine.begin_weight_update()
        engine.finish_weight_update(5)
        engine.wake_up()
        again = gather_and_generate(engine, requests, GREEDY, groups)
        return [sample.prompt_token_ids for sample in samples], {sample.weights_version for sample in again}
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error)
    finally:
        engine.close()
        groups.close()


def test_peers_receive_the_leaders_answers(folder):
    results = run_ranks(on_rank, 2, folder, (1, 2), timeout_seconds=60)
    assert results[0] == ([(5, 9, 11)] * 2, {5})
    assert results[1] == ([(6, 9, 11)] * 2 + [(6, 9, 12)] * 2, {5})


@pytest.mark.parametrize(("mode", "error"), [("death", EngineDiedError), ("no start", EngineStartError)])
def test_a_failure_of_the_leader_is_raised_on_every_rank(folder, mode, error):
    results = run_ranks(on_rank, 2, folder, (1, 1), mode, timeout_seconds=60)
    assert results[0][0] == error.__name__
    assert error.__name__ in results[1][0] + results[1][1] or results[1][0] == "RemoteError", results


def installed_engine():
    """Argument names of each method of the installed `sglang.Engine`, read without importing it."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip("sglang is not installed")
    source = Path(next(iter(found.submodule_search_locations)), "srt", "entrypoints", "engine.py").read_text()
    (engine,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Engine"]
    return {
        node.name: [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        for node in engine.body
        if isinstance(node, ast.FunctionDef)
    }


def test_the_double_has_the_real_engines_signatures():
    real = installed_engine()
    for name in ("generate", "flush_cache", "release_memory_occupation", "resume_memory_occupation", "shutdown"):
        ours = list(inspect.signature(getattr(sglang_double.Engine, name)).parameters)
        # The double follows the newest release; older ones have fewer arguments.
        assert set(real[name]) <= set(ours), name
        if "begin_weight_update" in real:
            assert set(ours) == set(real[name]), name
    assert {"prompt", "sampling_params", "input_ids", "image_data", "return_logprob"} <= set(real["generate"])


def test_every_argument_is_known_to_the_installed_server(folder):
    installed_engine()
    engine = SGLangEngine(
        sglang_config(folder, max_model_len=9, max_rows=2, load_weights=False), engine_class=sglang_double.Engine
    )
    arguments = set(engine.native.arguments)
    engine.close()
    root = Path(next(iter(importlib.util.find_spec("sglang").submodule_search_locations)), "srt")
    files = [root / "server_args.py", *(root / "arg_groups" / "fields").glob("*.py")]
    fields = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                fields |= {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
    assert arguments <= fields, arguments - fields
