"""The loop calls no ZeRO, FSDP or collective API, and the strategies know nothing of rewards and evaluation."""

import pytest

from contracts.layers import LAYERS, violations
from contracts.workspace import ROOT

SOURCES = ROOT / "packages" / "rft-trainer" / "src" / "rft_trainer"
FILES = [
    (file, layer) for layer in LAYERS for folder in layer.folders for file in sorted((SOURCES / folder).rglob("*.py"))
]


@pytest.mark.parametrize(("file", "layer"), FILES, ids=[str(f.relative_to(SOURCES)) for f, _ in FILES])
def test_a_layer_speaks_only_of_its_own(file, layer):
    assert violations(file.read_text(encoding="utf-8"), layer) == []


@pytest.mark.parametrize(
    ("number", "source"),
    [
        (0, "import torch.distributed as dist"),
        (0, "from torch.distributed.fsdp import fully_shard"),
        (0, "import deepspeed"),
        (0, "def f(x):\n    return x.full_tensor()"),
        (0, "from rft_dist import all_reduce_metrics"),
        (1, "from rft_rewards import RewardComputationEngine"),
        (1, "from rft_trainer.trainer.evaluation import Evaluator"),
        (1, "def reward_of(x):\n    return x"),
    ],
)
def test_each_kind_of_violation_is_seen(number, source):
    assert violations(source, LAYERS[number])
    assert not violations("from rft_dist import Mean\nx = Mean(1.0, 1)", LAYERS[number])
