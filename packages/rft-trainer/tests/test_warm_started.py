"""The model under a checkpoint: the warm start of its own run, wherever the reader writes."""

from pathlib import Path

import pytest

from rft_trainer.config import RFTConfig
from rft_trainer.errors import ConfigurationError
from rft_trainer.warm_start import FOLDER, RECORD, warm_started_folder


def config(run, **changes):
    checkpoint = run / "checkpoints" / "step_000002"
    return RFTConfig(warm_start_steps=3, resume_from=checkpoint, output_dir=Path("elsewhere"), **changes)


def test_a_checkpoint_stands_on_the_warm_start_of_its_own_run(tmp_path):
    (tmp_path / RECORD).write_text("{}")
    assert warm_started_folder(config(tmp_path)) == str(tmp_path / FOLDER)
    assert warm_started_folder(config(tmp_path, lora_rank=2)) == str(tmp_path / FOLDER)
    assert warm_started_folder(RFTConfig(resume_from=tmp_path / "checkpoints" / "step_000002")) is None


def test_adapters_whose_base_is_gone_are_refused(tmp_path):
    assert warm_started_folder(config(tmp_path)) is None
    with pytest.raises(ConfigurationError, match=r"adapters on the warm-started model .* which is not there"):
        warm_started_folder(config(tmp_path, lora_rank=2))
