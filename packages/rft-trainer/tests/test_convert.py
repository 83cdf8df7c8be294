"""The command that converts: what it cannot do is said before any process talks to another."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft_trainer.convert import main
from rft_trainer.testing import tiny_model_folder


@pytest.fixture
def error(capsys):
    def call(*flags):
        assert main([str(flag) for flag in flags]) == 2
        return capsys.readouterr().err

    return call


@pytest.fixture
def base(tmp_path):
    return tiny_model_folder(tmp_path / "base")


def test_what_is_missing_is_named(error, base, tmp_path):
    assert "pretrain is None and resume_from is None" in error()
    assert "for the other way --from_model FOLDER" in error("--pretrain", base)
    assert "no manifest.json there" in error("--pretrain", base, "--resume_from", tmp_path)
    assert "no such folder" in error("--from_model", tmp_path / "nothing", "--output_dir", tmp_path / "new")


def test_an_earlier_run_is_not_overwritten(error, base, tmp_path):
    (tmp_path / "run").mkdir()
    config = tmp_path / "run" / "config.json"
    config.write_text(json.dumps({"output_dir": str(tmp_path / "run"), "overwrite": True}))
    assert "give --output_dir with a new folder" in error("--config", config, "--from_model", base)
    assert config.is_file()


def test_a_model_that_a_checkpoint_cannot_hold_is_refused(error, base, tmp_path):
    flags = ("--pretrain", base, "--output_dir", tmp_path / "new", "--from_model")
    assert "lora_rank is 4: a checkpoint of adapters" in error(*flags, base, "--lora_rank", 4)
    wide = tiny_model_folder(tmp_path / "wide", hidden=32)
    assert "weights differ in name or shape, such as" in error(*flags, wide)
    deep = tiny_model_folder(tmp_path / "deep", layers=3)
    assert "such as model.layers.2.input_layernorm.weight, (64,) against absent" in error(*flags, deep)
    # Same shapes; a layer that is frozen in the run has another value in one place.
    other = tiny_model_folder(tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    said = error(*flags, other, "--freeze", "model.layers.0.mlp", "model.embed_tokens")
    assert "1 weights that freeze keeps differ" in said
    assert "model.layers.0.mlp.up_proj.weight" in said
    assert not (tmp_path / "new").exists()
    assert torch.equal(tensors["model.norm.weight"], load_file(base / "model.safetensors")["model.norm.weight"])
