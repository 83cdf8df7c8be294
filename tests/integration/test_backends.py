"""Both training backends against plain torch: same gradient norm, same weights, whatever the split."""

import pytest
import torch

from rft_dist.testing import run_ranks
from rft_trainer.config import OptimizerConfig
from rft_trainer.models import Actor, load_causal_model, padded_layout
from rft_trainer.optim import AdamWConfig, ScheduleConfig
from rft_trainer.testing import tiny_model_folder

BACKENDS = ["fsdp2", "zero0", "zero1", "zero2", "zero3"]
# the optimiser on the host, where DeepSpeed has kept the last gradient only
OFFLOADED = ["zero1 offload", "zero2 offload", "zero3 offload"]
LEFT_BEHIND = ["zero2", "zero3", "zero1 offload", "zero3 offload"]
ROWS, LENGTH, PROMPT = 8, 12, 4
NAMES = ("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "model.norm.weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def optimizer(max_norm=1.0, lr=1e-2):
    return OptimizerConfig(adamw=AdamWConfig(lr=lr), schedule=ScheduleConfig(), max_norm=max_norm)


def rows():
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 256, (ROWS, LENGTH), generator=generator)
    weights = torch.randn(ROWS, generator=generator)
    return ids, weights


def loss_of(module, ids, weights):
    """This part's share of the weighted mean over all response tokens of all rows."""
    scores = module(padded_layout(list(ids[:, :PROMPT]), list(ids[:, PROMPT:]), pad_token_id=0))
    return -(scores.log_probs * weights[:, None]).sum() / (ROWS * (LENGTH - PROMPT))


def plain(folder, config, steps):
    actor = Actor(load_causal_model(folder))
    optim = torch.optim.AdamW(actor.parameters(), lr=config.adamw.lr, betas=config.adamw.betas, weight_decay=0.0)
    norms = []
    for _ in range(steps):
        loss_of(actor, *rows()).backward()
        bound = config.max_norm or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(actor.parameters(), bound)))
        optim.step()
        optim.zero_grad()
    return norms, {name: p.detach().clone() for name, p in actor.model.named_parameters()}


def make_backend(kind, *, bf16=False):
    from rft_trainer.strategy import DeepspeedBackend, FSDPBackend

    device = torch.device("cpu")
    if kind == "fsdp2":
        return FSDPBackend(device, bf16=bf16)
    return DeepspeedBackend(device, stage=int(kind[4]), adam_offload="offload" in kind, bf16=bf16)


def full_weights(state):
    from rft_sync import source_for

    source = source_for(state.checkpoint_module)
    names = [meta.name for meta in source.metadata()]
    with source.gather(names) as tensors:
        return {name: tensors[name].detach().clone() for name in NAMES}


def train(rank, world, folder, kind, micro, steps, max_norm, poison_step, bf16=False):
    backend = make_backend(kind, bf16=bf16)
    state = backend.prepare(Actor(load_causal_model(folder)), optimizer(max_norm))
    ids, weights = rows()
    mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    reports = []
    for step in range(steps):
        parts = list(zip(*(t[mine].split(micro) for t in (ids, weights)), strict=True))
        for number, part in enumerate(parts):
            loss = loss_of(state.module, *part)
            if step == poison_step and rank == world - 1 and number == 0:
                loss = loss * float("nan")
            backend.backward(state, loss, last=number == len(parts) - 1)
        reports.append(backend.optimizer_step(state))
    return reports, full_weights(state)


SPLITS = [(kind, micro) for kind in BACKENDS for micro in (1, 4)]


def train_in_turn(rank, world, folder, plans):
    """Every case by the same processes, which is most of its price."""
    return [train(rank, world, folder, *plan) for plan in plans]


def run_in_turn(folder, plans):
    """Results of each plan by name, and by rank."""
    results = run_ranks(train_in_turn, 2, folder, list(plans.values()), timeout_seconds=550)
    return {name: [of_rank[number] for of_rank in results] for number, name in enumerate(plans)}


@pytest.fixture(scope="module")
def two_processes(folder):
    """Runs by (kind, micro-batch), and by (kind, "nan") where the first step meets a number that is none."""
    splits = {(kind, micro): (kind, micro, 2, 0.05, None) for kind, micro in [*SPLITS, ("zero2 offload", 1)]}
    return run_in_turn(folder, {**splits, **{(kind, "nan"): (kind, 2, 2, 0.0, 0) for kind in BACKENDS}})


@pytest.fixture(scope="module")
def clipped(folder):
    return plain(folder, optimizer(0.05), steps=2)


@pytest.fixture(scope="module")
def unclipped(folder):
    return plain(folder, optimizer(0.0), steps=1)


def assert_one_big_batch(results, expected):
    norms, weights = expected
    for reports, got in results:
        assert [r.grad_norm for r in reports] == pytest.approx(norms, rel=1e-5)
        assert not any(r.skipped for r in reports)
        for name in NAMES:
            assert torch.allclose(got[name], weights[name], atol=2e-5), name


@pytest.mark.parametrize(("kind", "micro"), [*SPLITS, ("zero2 offload", 1)])
def test_gradient_and_steps_equal_one_big_batch(two_processes, clipped, kind, micro):
    assert_one_big_batch(two_processes[kind, micro], clipped)


@pytest.mark.slow
def test_gradient_and_steps_with_the_optimiser_on_the_host_equal_one_big_batch(folder, clipped):
    for results in run_in_turn(folder, {kind: (kind, 1, 2, 0.05, None) for kind in OFFLOADED}).values():
        assert_one_big_batch(results, clipped)


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_nan_on_one_rank_skips_the_step_on_all(two_processes, unclipped, kind):
    norms, weights = unclipped
    for reports, got in two_processes[kind, "nan"]:
        assert [r.skipped for r in reports] == [True, False]
        assert reports[1].grad_norm == pytest.approx(norms[0], rel=1e-5)
        for name in NAMES:
            assert torch.allclose(got[name], weights[name], atol=2e-5), name


def clean_and_skipped(rank, world, folder, kind):
    clean = train(rank, world, folder, kind, 2, 1, 0.05, None, bf16=True)
    return clean, train(rank, world, folder, kind, 2, 2, 0.05, 0, bf16=True)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) for k in LEFT_BEHIND] + ["zero2 offload"])
def test_a_skipped_step_in_bf16_leaves_no_gradient_behind(folder, kind):
    """Sums in fp32 lie beside the gradients that a skipped step forgets."""
    for (clean, weights), (reports, got) in run_ranks(clean_and_skipped, 2, folder, kind, timeout_seconds=500):
        assert [r.skipped for r in reports] == [True, False]
        assert reports[1].grad_norm == pytest.approx(clean[0].grad_norm, rel=1e-6)
        for name in NAMES:
            assert got[name].equal(weights[name]), name


def two_rates(rank, world, folder, kind):
    """Weights in bfloat16: as loaded, after a step at rate 0, and after one at rate 1e-6."""
    found = []
    for rate in (0.0, 1e-6):
        backend = make_backend(kind, bf16=True)
        state = backend.prepare(Actor(load_causal_model(folder)), optimizer(lr=rate))
        found.append(full_weights(state))
        ids, weights = rows()
        mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
        backend.backward(state, loss_of(state.module, ids[mine], weights[mine]), last=True)
        assert not backend.optimizer_step(state).skipped
        found.append(full_weights(state))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "zero2", *OFFLOADED])
def test_the_first_step_begins_at_the_weights_that_were_loaded(folder, kind):
    """Masters that were not made of the loaded weights would be written back by it."""
    for before, still, again, moved in run_ranks(two_rates, 2, folder, kind, timeout_seconds=500):
        for name, loaded in before.items():
            assert still[name].equal(loaded), name
            assert again[name].equal(loaded), name
            # one step of Adam is the rate; behind it comes the rounding to the dtype of the weights
            step = (moved[name].float() - loaded.float()).abs()
            assert (step <= 1.01e-6 + loaded.float().abs() * torch.finfo(loaded.dtype).eps).all(), name
