"""SGLangEngine with the real SGLang on the CPU; skipped where it is not installed (docs/engines/sglang.md says how)."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rft_engines import GenerationRequest, HFEngine, SamplingParams
from rft_engines.sglang.process import _is_alive

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="the extra sglang is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these tests run SGLang on the CPU, and CUDA is there"),
]

HERE = Path(__file__).parent
GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
SHAPE = {
    "vocab_size": 500, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def save_model(path, seed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(initializer_range=0.1, eos_token_id=2, pad_token_id=0, **SHAPE))
    # No rollout may be sampled by these.
    model.generation_config.update(do_sample=True, repetition_penalty=1.1, top_p=0.8, top_k=20, temperature=0.5)
    model.save_pretrained(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_model(root / "model", seed=0)
    save_model(root / "other", seed=1)
    return root / "model"


def command(mode, folder, output, ranks):
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [sys.executable, *launcher, str(HERE / "sglang_run.py"), mode, str(folder), str(output)]


def environment():
    paths = [str(HERE / "sglang_cpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1",
        # Cores of each scheduler of a TP group.
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0",
    }  # fmt: skip


def results(mode, folder, output, ranks=1):
    run = subprocess.run(
        command(mode, folder, output, ranks),
        env=environment(), timeout=570, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    return [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def reference(model, prompt, tokens):
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0], dim=-1)
    return [log_probs[len(prompt) - 1 + place, token].item() for place, token in enumerate(tokens)]


def assert_no_orphans(pids):
    assert pids
    deadline = time.monotonic() + 30
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in pids if _is_alive(pid)] == []


def test_sglang_engine_conforms_alone(folder, tmp_path):
    (found,) = results("conform", folder, tmp_path)
    assert found["checks"] == 40
    assert_no_orphans(found["children"])
    model = HFEngine(folder).native
    assert json.loads((folder / "generation_config.json").read_text())["repetition_penalty"] == 1.1
    assert len(found["sampled"]) == 4
    for prompt, tokens, log_probs in found["sampled"]:
        # A penalty would move each of them, a truncation would renormalise them.
        assert log_probs == pytest.approx(reference(model, prompt, tokens), abs=1e-4)
    prefix = found["prefix"]
    assert prefix["cached before"] > 0
    assert prefix["cached after"] == 0
    for name, path in (("old", folder), ("new", folder.parent / "other")):
        ((prompt, tokens, log_probs),) = prefix[name]
        (fresh,) = HFEngine(path).generate([GenerationRequest(tuple(prompt))], GREEDY)
        assert tokens == list(fresh.token_ids)
        assert log_probs[0] == pytest.approx(fresh.log_probs[0], abs=1e-3)


def test_two_ranks_of_one_engine_conform(folder, tmp_path):
    found = results("ranks", folder, tmp_path, ranks=2)
    assert [rank["owns"] for rank in found] == [True, False]
    assert [rank["checks"] for rank in found] == [40, 40]
    hf = HFEngine(folder)
    for name, counts in (("uneven", (2, 1)), ("empty", (0, 2)), ("none", (0, 0))):
        for rank, own in enumerate(found):
            requests = [GenerationRequest((5, 9, 11 + rank, 3 + place)) for place in range(counts[rank])]
            expected = hf.generate(requests, GREEDY)
            assert [row[:2] for row in own[name]] == [
                [list(sample.prompt_token_ids), list(sample.token_ids)] for sample in expected
            ]
            for row, sample in zip(own[name], expected, strict=True):
                assert row[2] == pytest.approx(sample.log_probs, abs=1e-4)
    assert_no_orphans(found[0]["children"])


def test_a_killed_scheduler_is_noticed_on_every_rank(folder, tmp_path):
    leader, peer = results("death", folder, tmp_path, ranks=2)
    for rank in (leader, peer):
        assert len(rank["errors"]) == 2
        for name, message, *_ in rank["errors"]:
            assert "EngineDiedError" in name + message or name == "RemoteError", rank["errors"]
            assert "has ended" in message
    assert leader["errors"][0][2] < 30, "seconds from the kill to the error"
    assert_no_orphans(leader["children"])


@pytest.mark.parametrize("mode", ["exception", "interrupt"])
def test_a_program_that_ends_without_close_leaves_no_orphans(folder, tmp_path, mode):
    report, log = tmp_path / "rank0.json", tmp_path / "log"
    with log.open("w") as output:
        program = subprocess.Popen(
            command(mode, folder, tmp_path, 1),
            env=environment(), stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 500
        while program.poll() is None and time.monotonic() < deadline and not report.is_file():
            time.sleep(0.2)
        if mode == "interrupt":
            time.sleep(2)
            # What Ctrl-C in a terminal does: every process of the foreground group gets it.
            os.killpg(program.pid, signal.SIGINT)
        assert program.wait(60) != 0
    finally:
        if program.poll() is None:
            program.kill()
    assert report.is_file(), log.read_text()[-4000:]
    assert ("ArithmeticError" if mode == "exception" else "KeyboardInterrupt") in log.read_text()
    assert_no_orphans(json.loads(report.read_text())["children"])
