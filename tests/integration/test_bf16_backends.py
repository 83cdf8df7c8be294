"""One update in bfloat16: the backends agree to 1e-3 where gradients are added up in fp32."""

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
IN_FP32 = ("zero2", "zero3", "zero1 offload", "zero2 offload", "zero3 offload")
IN_BF16 = ("zero0", "zero1")
"""Stages that DeepSpeed does not let add up in fp32, or only by holding whole fp32 gradients for good."""
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


def sweeps(rank, world, folder, kinds):
    return {kind: sweep(rank, world, folder, kind) for kind in kinds}


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
            else DeepspeedBackend(device, stage=int(kind[4]), adam_offload="offload" in kind, bf16=True)
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


def compare(folder, world, kinds):
    """kind -> (gradients, metrics) in bfloat16, "fsdp2" among them, and those of plain fp32."""
    (alone,) = run_ranks(sweep, 1, folder, "plain", timeout_seconds=500)
    return alone, run_ranks(sweeps, world, folder, ("fsdp2", *kinds), timeout_seconds=500)[0]


def assert_one_loss(results, exact):
    for kind, (_, found) in results.items():
        assert found["train/loss"] == pytest.approx(results["fsdp2"][1]["train/loss"], rel=1e-3), kind
        assert found["train/loss"] == pytest.approx(exact[1]["train/loss"], rel=2e-3), kind


def test_fsdp_and_zero_2_in_bf16_have_one_gradient(folder):
    """Each backward rounds to bfloat16 once; nothing is rounded behind it, so the backends differ by fp32 alone."""
    results = run_ranks(sweeps, 2, folder, ("fsdp2", "zero2"), timeout_seconds=500)[0]
    (fsdp, metrics), (zero, found) = results["fsdp2"], results["zero2"]
    assert distance(zero, fsdp) < 1e-5
    assert 1e-3 < distance(rounded(fsdp), fsdp) < 2e-3
    assert found["train/loss"] == pytest.approx(metrics["train/loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_stage_that_adds_up_in_fp32_has_the_gradient_of_fsdp(folder, world):
    """ZeRO 2 divides by the number of ranks in bfloat16, which is exact for powers of two alone."""
    exact, results = compare(folder, world, IN_FP32)
    assert_one_loss(results, exact)
    for kind, (gradients, _) in results.items():
        assert distance(gradients, results["fsdp2"][0]) < 1e-5, kind
        assert 1e-3 < distance(gradients, exact[0]) < 8e-3, kind


@pytest.mark.slow
def test_stages_that_add_up_in_bf16_differ_by_less_than_bf16_from_fp32(folder):
    """One rounding of a sum to bfloat16 costs more than 1e-3, so 1e-3 cannot hold there; the loss has no such sum."""
    exact, results = compare(folder, 2, IN_BF16)
    fsdp = results["fsdp2"][0]
    assert 1e-3 < distance(rounded(fsdp), fsdp) < 2e-3
    assert_one_loss(results, exact)
    for kind in IN_BF16:
        assert distance(results[kind][0], exact[0]) < 8e-3, kind
        assert 1e-3 < distance(results[kind][0], fsdp) < 3e-3, kind
