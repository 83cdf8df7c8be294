"""Where a checkpoint comes from."""

import shutil

import pytest

from rft_trainer.errors import ConfigurationError
from rft_trainer.models import checkpoint_folder, load_causal_model
from rft_trainer.testing import tiny_model_folder


def test_a_folder_is_itself(tmp_path):
    folder = tiny_model_folder(tmp_path / "tiny")
    assert checkpoint_folder(str(folder)) == str(folder)


def test_a_hub_id_is_its_cached_snapshot(tmp_path, monkeypatch):
    """The hub's own cache layout, offline: refs/main names the snapshot."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    stored = tmp_path / "models--maker--tiny"
    commit = "0" * 40
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text(commit)
    shutil.copytree(tiny_model_folder(tmp_path / "tiny"), stored / "snapshots" / commit)
    folder = checkpoint_folder("maker/tiny", cache_dir=tmp_path)
    assert folder == str(stored / "snapshots" / commit)
    assert load_causal_model(folder).config.vocab_size == 259


@pytest.mark.parametrize("name", ["maker/absent", "not//an id"])
def test_an_id_that_cannot_be_had_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match=f"pretrain is '{name}'"):
        checkpoint_folder(name, cache_dir=tmp_path)
