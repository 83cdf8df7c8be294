"""What a trainer writes for each model: a failure of one rank is that of all before the next model's collectives."""

from types import SimpleNamespace

import pytest

from rft_trainer.config import RFTConfig
from rft_trainer.testing import AloneDataParallel
from rft_trainer.trainer import PPOTrainer


def trainer(backend, agreed):
    """One that has a critic, and nothing besides what saving needs."""

    class Watched(AloneDataParallel):
        def together(self, error):
            agreed.append(error)
            super().together(error)

    made = object.__new__(PPOTrainer)
    made.config, made.backend, made.data = RFTConfig(), backend, Watched()
    made.actor, made.critic, made.average = "actor", "critic", None
    made.rollouts = SimpleNamespace(save_held=lambda folder, rank: None)
    return made


def test_an_actor_that_cannot_be_written_stops_before_the_critic(tmp_path):
    saved, agreed, failing = [], [], OSError("no space left")

    def save(state, folder, *, background):
        saved.append((state, folder))
        if state == "actor" and failing:
            raise failing

    made = trainer(SimpleNamespace(save=save), agreed)
    with pytest.raises(OSError, match="no space left"):
        made._save_models(tmp_path)
    assert saved == [("actor", tmp_path)]
    assert agreed == [failing]
    saved.clear()
    failing = None
    assert made._save_models(tmp_path) == []
    assert saved == [("actor", tmp_path), ("critic", tmp_path / "critic")]
