"""One update in bfloat16: the backends agree with each other as closely as with fp32, or closer."""

import pytest
import torch

from integration.test_invariance import GradientProbe, Plain, distance, settings
from rft_dist.testing import run_ranks
from rft_trainer.config import RFTConfig
from rft_trainer.experience import Collator, Experience, MicroBatchPlanner
from rft_trainer.models import Actor, load_causal_model
from rft_trainer.session import update_config
from rft_trainer.strategy import DeepspeedBackend, FSDPBackend, WorldDataParallel
from rft_trainer.testing import tiny_model_folder
from rft_trainer.trainer.update import PolicyUpdate

ROWS, LONGEST = 4, 20
KINDS = ("fsdp2", "zero1", "zero2", "zero3")
CASE = ("ppo", {"loss_aggregation": "token-mean", "init_kl_coef": 0.1}, 1, "right")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def rows():
    """Responses behind long prompts: positions of several hundred, where rounded rotary frequencies would show."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for number in range(ROWS):
        length = LONGEST - 3 * number
        near = [-5.5 + 0.3 * torch.randn(length, generator=generator) for _ in range(3)]
        found.append(
            Experience(
                group=number,
                prompt_ids=torch.randint(0, 256, (500 + 40 * number,), generator=generator),
                response_ids=torch.randint(0, 256, (length,), generator=generator),
                response_mask=torch.arange(length) != 4,
                engine_log_probs=near[0],
                weights_version=1,
                truncated=False,
                old_log_probs=near[1],
                ref_log_probs=near[2],
                advantages=torch.randn(length, generator=generator),
            )
        )
    return found


def sweep(rank, world, folder, kind):
    data = WorldDataParallel(torch.device("cpu"), None)
    if kind == "plain":
        actor = Actor(load_causal_model(folder))
        probe, state = GradientProbe(Plain()), type("State", (), {"module": actor, "network": actor})()
    else:
        device = torch.device("cpu")
        backend = (
            FSDPBackend(device, bf16=True)
            if kind == "fsdp2"
            else DeepspeedBackend(device, stage=int(kind[-1]), bf16=True)
        )
        state = backend.prepare(Actor(load_causal_model(folder)), RFTConfig().actor_optimizer())
        probe = GradientProbe(backend)
    config = settings(*CASE)
    update = PolicyUpdate(
        update_config(config),
        backend=probe,
        data=data,
        planner=MicroBatchPlanner(data, responses=1),
        kl=config.kl_controller(),
        collator=Collator(pad_token_id=0, device=torch.device("cpu"), layout=config.batch_layout),
        on_step=lambda: None,
    )
    share = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    metrics = data.reduce_metrics(update(state, rows()[share]))
    return probe.gradients, metrics


def rounded(gradients):
    return {name: gradient.bfloat16().float() for name, gradient in gradients.items()}


@pytest.mark.slow
def test_backends_in_bf16_differ_by_less_than_bf16_from_fp32(folder):
    """FSDP2 reduces and adds up gradients in fp32, ZeRO in bfloat16, and one rounding to it costs more than 1e-3.

    So 1e-3 between them cannot hold in the gradient; it does in the loss, whose forward is the same.
    """
    exact, expected = run_ranks(sweep, 1, folder, "plain", timeout_seconds=500)[0]
    results = {kind: run_ranks(sweep, 2, folder, kind, timeout_seconds=500)[0] for kind in KINDS}
    fsdp, metrics = results["fsdp2"]
    assert 1e-3 < distance(rounded(fsdp), fsdp) < 2e-3
    for kind, (gradients, found) in results.items():
        assert found["train/loss"] == pytest.approx(metrics["train/loss"], rel=1e-3), kind
        assert found["train/loss"] == pytest.approx(expected["train/loss"], rel=2e-3), kind
        assert distance(gradients, exact) < 8e-3, kind
        assert distance(gradients, fsdp) < 4e-3, kind
