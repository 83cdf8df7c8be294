"""One update is one number: gradient, loss and metrics do not depend on ranks, micro-batches, layout or backend.

Each spawn prepares a model once and loops over its grid; the gradients are read instead of being applied. The rows hold
masks with holes, rows without a trained token and, on four ranks, a rank without one.
"""

from dataclasses import dataclass, field

import pytest
import torch

from rft_dist.testing import run_ranks
from rft_trainer.algorithms import PolicyLoss
from rft_trainer.config import RFTConfig
from rft_trainer.experience import Collator, Experience, MicroBatchPlanner
from rft_trainer.models import Actor, load_causal_model
from rft_trainer.session import update_config
from rft_trainer.strategy import DeepspeedBackend, FSDPBackend, WorldDataParallel
from rft_trainer.strategy.protocols import StepReport
from rft_trainer.testing import tiny_model_folder
from rft_trainer.trainer.update import PolicyUpdate

ROWS = 8
TOLERANCE = 1e-5
RESPONSES = (5, 1, 9, 3, 7, 4, 2, 6)
LAYOUTS = {"right": {}, "left": {"padding_side": "left"}, "packed": {"packing": True}}
MICRO = (1, 2, ROWS)
GRID = [(micro, layout) for micro in MICRO for layout in LAYOUTS]
CORNERS = [(1, "packed"), (ROWS, "left")]
FULL = {
    "ppo": {"loss_aggregation": "token-mean", "init_kl_coef": 0.1},
    "gspo": {"loss_aggregation": "seq-mean-token-mean", "init_kl_coef": 0.1, "kl_estimator": "k2"},
}
AGGREGATION = ("seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean", "seq-mean-token-mean")
EVERY = {
    name: {"loss_aggregation": AGGREGATION[number % len(AGGREGATION)]} for number, name in enumerate(PolicyLoss.names())
}
TERMS = {
    "entropy_coef": 0.01,
    "high_entropy_ratio": 0.5,
    "importance_sampling": "truncate",
    "importance_cap": 1.1,
    "loss_aggregation": "token-mean",
}
CASES = [
    *(("clip_higher", TERMS, micro, layout) for micro, layout in CORNERS),
    *((name, changes, micro, layout) for name, changes in FULL.items() for micro, layout in GRID),
    *((name, changes, micro, layout) for name, changes in EVERY.items() for micro, layout in CORNERS),
]
DEFAULT = [(2, "fsdp2"), (2, "zero2"), (4, "zero3")]
REST = [
    (world, kind)
    for world in (1, 2, 4)
    for kind in ("fsdp2", "zero0", "zero1", "zero2", "zero3")
    if (world, kind) not in DEFAULT
]
SPREADS = [*DEFAULT, *(pytest.param(*spread, marks=pytest.mark.slow) for spread in REST)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def rows():
    """Eight rows with every column that an update may read; the last two train nothing, the third has a hole."""
    generator = torch.Generator().manual_seed(3)

    def near_uniform(length):
        return -5.5 + 0.3 * torch.randn(length, generator=generator)

    found = []
    for number, length in enumerate(RESPONSES):
        mask = torch.ones(length, dtype=torch.bool)
        if number == 2:
            mask[3:6] = False
        if number >= ROWS - 2:
            mask[:] = False
        found.append(
            Experience(
                group=number // 2,
                prompt_ids=torch.randint(0, 256, (2 + number % 3,), generator=generator),
                response_ids=torch.randint(0, 256, (length,), generator=generator),
                response_mask=mask,
                engine_log_probs=near_uniform(length),
                weights_version=1,
                truncated=False,
                old_log_probs=near_uniform(length),
                ref_log_probs=near_uniform(length),
                advantages=torch.randn(length, generator=generator),
            )
        )
    return found


def settings(loss, changes, micro, layout):
    return RFTConfig(
        policy_loss=loss,
        rollout_batch_size=ROWS // 2,
        n_samples_per_prompt=2,
        generate_max_len=max(RESPONSES),
        micro_train_batch_size=micro,
        **changes,
        **LAYOUTS[layout],
    )


@dataclass
class GradientProbe:
    """A backend whose optimiser step reads the whole gradients and leaves the weights alone."""

    backend: object
    gradients: dict = field(default_factory=dict)

    def backward(self, state, loss, *, last):
        self.backend.backward(state, loss, last=last)

    def optimizer_step(self, state):
        self.gradients = {name: full_gradient(p, self.backend) for name, p in state.network.named_parameters()}
        if isinstance(self.backend, DeepspeedBackend):
            self.backend._discard_gradients(state)
        else:
            state.network.zero_grad(set_to_none=True)
        return StepReport(grad_norm=0.0, learning_rate=0.0, skipped=False)


def full_gradient(parameter, backend):
    if isinstance(backend, DeepspeedBackend) and backend.name != "deepspeed zero 0":
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter).float().clone()
    gradient = parameter.grad
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()


class Plain:
    """Plain torch in one process."""

    name = "plain"

    def backward(self, state, loss, *, last):
        loss.backward()


def one_update(probe, state, data, config):
    """(gradients by name, metrics) of one update over this rank's share of the rows."""
    planner = MicroBatchPlanner(data, responses=config.micro_train_batch_size)
    update = PolicyUpdate(
        update_config(config),
        backend=probe,
        data=data,
        planner=planner,
        kl=config.kl_controller(),
        collator=Collator(pad_token_id=0, device=torch.device("cpu"), layout=config.batch_layout),
        on_step=lambda: None,
    )
    share = slice(data.rank * ROWS // data.size, (data.rank + 1) * ROWS // data.size)
    metrics = data.reduce_metrics(update(state, rows()[share]))
    return probe.gradients, metrics


def make_backend(kind):
    device = torch.device("cpu")
    return FSDPBackend(device) if kind == "fsdp2" else DeepspeedBackend(device, stage=int(kind[-1]))


def sweep(rank, world, folder, kind, cases):
    data = WorldDataParallel(torch.device("cpu"), None)
    if kind == "plain":
        actor = Actor(load_causal_model(folder))
        probe, state = GradientProbe(Plain()), type("State", (), {"module": actor, "network": actor})()
    else:
        backend = make_backend(kind)
        state = backend.prepare(Actor(load_causal_model(folder)), RFTConfig().actor_optimizer())
        probe = GradientProbe(backend)
    results = [one_update(probe, state, data, settings(*case)) for case in cases]
    return results if rank == 0 else None


def case_name(case):
    return "-".join(map(str, (case[0], *case[2:])))


@pytest.fixture(scope="module")
def alone(folder):
    """One process of plain torch, everything in one right-padded micro-batch: by loss and settings."""
    cases = {(case[0], repr(case[1])): (case[0], case[1], ROWS, "right") for case in CASES}
    (results,) = run_ranks(sweep, 1, folder, "plain", list(cases.values()), timeout_seconds=500)
    return dict(zip(cases, results, strict=True))


def distance(got, expected):
    """Relative distance of two gradients as whole vectors."""
    square = sum((got[name] - tensor).square().sum() for name, tensor in expected.items())
    return float((square / sum(tensor.square().sum() for tensor in expected.values())).sqrt())


@pytest.mark.parametrize(("world", "kind"), SPREADS)
def test_gradient_loss_and_metrics_are_those_of_one_batch(folder, alone, world, kind):
    results = run_ranks(sweep, world, folder, kind, CASES, timeout_seconds=600)[0]
    for case, (gradients, metrics) in zip(CASES, results, strict=True):
        expected_gradients, expected_metrics = alone[case[0], repr(case[1])]
        assert distance(gradients, expected_gradients) <= TOLERANCE, case_name(case)
        assert metrics == pytest.approx(expected_metrics, rel=TOLERANCE, abs=1e-6), case_name(case)


def test_the_reference_is_the_written_formula(folder, alone):
    """PPO over all trained tokens, divided by their number, plus 0.1 times k3: by hand, row by row, full logits."""
    model = load_causal_model(folder)
    experiences = rows()
    total = torch.zeros(())
    for row in experiences:
        ids = torch.cat([row.prompt_ids, row.response_ids])
        logits = model(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(1, row.response_ids[:, None]).squeeze(1)
        ratio = (log_probs - row.old_log_probs).exp()
        surrogate = torch.minimum(ratio * row.advantages, ratio.clamp(0.8, 1.2) * row.advantages)
        behind = row.ref_log_probs - log_probs
        token_loss = -surrogate + 0.1 * (behind.exp() - 1 - behind)
        total = total + token_loss[row.response_mask].sum()
    loss = total / sum(int(row.response_mask.sum()) for row in experiences)
    loss.backward()
    gradients, metrics = alone["ppo", repr(FULL["ppo"])]
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), rel=TOLERANCE)
    written = {f"model.{name}": p.grad for name, p in model.named_parameters()}
    assert distance(gradients, written) <= TOLERANCE
