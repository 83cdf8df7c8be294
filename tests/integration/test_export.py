"""Exported folders: what transformers loads from them is the model that was trained, written one file at a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rft_dist.testing import run_ranks
from rft_trainer import RFTConfig, convert
from rft_trainer.checkpoint import CheckpointStore, TrainerState, read_manifest
from rft_trainer.errors import CheckpointError
from rft_trainer.export import export_model
from rft_trainer.models import Actor, load_causal_model, load_tokenizer, padded_layout
from rft_trainer.strategy import get_strategy
from rft_trainer.testing import tiny_model_folder

FILE_BYTES = 60_000


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    made = tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny", tie=request.param)
    file = made / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_length": 77}))
    return str(made)


def trained_and_exported(rank, world, folder, output):
    """One step, a checkpoint, an export in small files; (weights of the live model, sizes of what was held)."""
    settings = RFTConfig(pretrain=folder, fsdp=True, output_dir=output, actor_learning_rate=1e-2)
    with get_strategy(settings).setup_distributed() as strategy:
        actor = strategy.prepare(Actor(load_causal_model(folder)))
        layout = padded_layout([torch.tensor([5, 6])], [torch.tensor([7, 8, 9])], pad_token_id=0)
        strategy.backward(actor, -actor.module(layout).log_probs.sum() / world)
        strategy.optimizer_step(actor)
        store = CheckpointStore(Path(output) / "checkpoints", strategy.data)
        state = TrainerState(step=1, weights_version=2, world_size=world, strategy=strategy.backend.name)
        store.save(state, lambda shards: strategy.backend.save(actor, shards) or ())
        strategy.on_main(lambda: (Path(output) / "config.json").write_text(json.dumps(settings.as_dict())))
        tokenizer = load_tokenizer(folder)
        export_model(actor, Path(output) / "model", tokenizer, group=strategy.host_group, max_file_bytes=FILE_BYTES)
        with pytest.raises(CheckpointError, match="could not be written"):
            export_model(actor, Path(folder) / "config.json" / "x", tokenizer, group=strategy.host_group)
        weights = {name: p.full_tensor().detach().clone() for name, p in actor.checkpoint_module.named_parameters()}
        return weights


def greedy(model, tokens=12):
    ids = torch.tensor([[72, 101, 108]])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False).tolist()


def test_an_exported_folder_is_the_trained_model(folder, tmp_path):
    weights = run_ranks(trained_and_exported, 2, folder, str(tmp_path), timeout_seconds=500)[0]
    exported = load_causal_model(str(tmp_path / "model"))
    before = load_causal_model(folder)
    expected = load_causal_model(folder)
    expected.load_state_dict(weights, strict=False)
    found = dict(exported.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert not torch.equal(found["model.norm.weight"], dict(before.named_parameters())["model.norm.weight"])
    assert greedy(exported) == greedy(expected)
    assert exported.generation_config.max_length == 77
    assert load_tokenizer(str(tmp_path / "model")).chat_template == load_tokenizer(folder).chat_template
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    largest = max(tensor.nbytes for tensor in weights.values())
    assert len(files) > 3
    # Never more than one file at a time, each within the limit unless one tensor or one fused group is larger.
    assert max(file.stat().st_size for file in files) < max(FILE_BYTES, 3 * largest)
    command = [sys.executable, "-m", "rft_trainer.convert", "--config", tmp_path / "config.json", "--device", "cpu"]
    command += ["--resume_from", tmp_path / "checkpoints" / "step_000001"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    converted = dict(load_causal_model(str(tmp_path / "model_step_000001")).named_parameters())
    assert all(torch.equal(converted[name], weights[name]) for name in weights)


def there_and_back(rank, world, folder, output, *strategy):
    """Exit codes of the command: a checkpoint of a folder, and a folder of that checkpoint."""
    made = convert.main(["--device", "cpu", *strategy, "--from_model", folder, "--output_dir", output])
    config = ["--config", f"{output}/config.json"]
    return made, convert.main([*config, "--resume_from", f"{output}/checkpoints/step_000000"])


@pytest.mark.parametrize("strategy", [("--fsdp",), pytest.param(("--zero_stage", "3"), marks=pytest.mark.slow)])
def test_a_folder_that_becomes_a_checkpoint_and_a_folder_again_is_the_same(folder, tmp_path, strategy):
    output = tmp_path / "run"
    assert run_ranks(there_and_back, 2, folder, str(output), *strategy, timeout_seconds=500) == [(0, 0), (0, 0)]
    assert (output / "checkpoints" / "latest").read_text() == "step_000000"
    state = read_manifest(output / "checkpoints" / "step_000000")
    assert (state.step, state.world_size, state.sampler, state.update) == (0, 2, {}, {})
    before = load_file(f"{folder}/model.safetensors")
    after = load_file(output / "model_step_000000" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
