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
from rft_trainer.models import Actor, Critic, load_causal_model
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
VALUE_LOSS = "value"
VALUE_TERMS = {"value_clip": 0.2}
VALUE_CORNERS = [(VALUE_LOSS, VALUE_TERMS, micro, layout) for micro, layout in CORNERS]
VALUE_GRID = [(VALUE_LOSS, VALUE_TERMS, micro, layout) for micro, layout in GRID]
DEFAULT = [(2, "fsdp2"), (2, "zero2"), (4, "zero3")]
REST = [
    (world, kind)
    for world in (1, 2, 4)
    for kind in ("fsdp2", "zero0", "zero1", "zero2", "zero3")
    if (world, kind) not in DEFAULT
]
SPREADS = [
    *((*spread, [*CASES, *VALUE_CORNERS]) for spread in DEFAULT),
    *(pytest.param(*spread, [*CASES, *VALUE_GRID], marks=pytest.mark.slow) for spread in REST),
]


def spread_name(value):
    return "" if isinstance(value, list) else str(value)


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
                values=0.5 * torch.randn(length, generator=generator),
                returns=torch.randn(length, generator=generator),
            )
        )
    return found


def settings(loss, changes, micro, layout):
    return RFTConfig(
        policy_loss="ppo" if loss == VALUE_LOSS else loss,
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


def fresh_critic(folder):
    """A critic whose head is not at 0, so that its whole body has a gradient."""
    critic = Critic(load_causal_model(folder))
    with torch.no_grad():
        critic.head.weight.copy_(0.1 * torch.sin(torch.arange(critic.head.weight.numel())))
        critic.head.bias.fill_(0.2)
    return critic


def one_update(probe, states, data, case):
    """(gradients by name, metrics) of one update over this rank's share of the rows, of the actor or of the critic."""
    config, (actor, critic) = settings(*case), states
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
    learns_values = case[0] == VALUE_LOSS
    found = update(actor, rows()[share], critic=critic if learns_values else None, critic_only=learns_values)
    metrics = data.reduce_metrics(found)
    return probe.gradients, metrics


def make_backend(kind):
    device = torch.device("cpu")
    return FSDPBackend(device) if kind == "fsdp2" else DeepspeedBackend(device, stage=int(kind[-1]))


def sweep(rank, world, folder, kind, cases):
    data = WorldDataParallel(torch.device("cpu"), None)
    if kind == "plain":
        models = (Actor(load_causal_model(folder)), fresh_critic(folder))
        probe = GradientProbe(Plain())
        states = [type("State", (), {"module": model, "network": model})() for model in models]
    else:
        backend = make_backend(kind)
        options = RFTConfig().actor_optimizer()
        states = [
            backend.prepare(Actor(load_causal_model(folder)), options),
            backend.prepare(fresh_critic(folder), options, role="critic"),
        ]
        probe = GradientProbe(backend)
    results = [one_update(probe, states, data, case) for case in cases]
    return results if rank == 0 else None


def case_name(case):
    return "-".join(map(str, (case[0], *case[2:])))


@pytest.fixture(scope="module")
def alone(folder):
    """One process of plain torch, everything in one right-padded micro-batch: by loss and settings."""
    cases = {(case[0], repr(case[1])): (case[0], case[1], ROWS, "right") for case in [*CASES, *VALUE_CORNERS]}
    (results,) = run_ranks(sweep, 1, folder, "plain", list(cases.values()), timeout_seconds=500)
    return dict(zip(cases, results, strict=True))


def distance(got, expected):
    """Relative distance of two gradients as whole vectors."""
    square = sum((got[name] - tensor).square().sum() for name, tensor in expected.items())
    return float((square / sum(tensor.square().sum() for tensor in expected.values())).sqrt())


@pytest.mark.parametrize(("world", "kind", "cases"), SPREADS, ids=spread_name)
def test_gradient_loss_and_metrics_are_those_of_one_batch(folder, alone, world, kind, cases):
    results = run_ranks(sweep, world, folder, kind, cases, timeout_seconds=600)[0]
    for case, (gradients, metrics) in zip(cases, results, strict=True):
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


def test_the_reference_of_the_critic_is_the_written_formula(folder, alone):
    """Half the larger of the plain and the clipped squared error over all trained tokens: by hand, row by row."""
    critic = fresh_critic(folder)
    experiences = rows()
    total = torch.zeros(())
    for row in experiences:
        ids = torch.cat([row.prompt_ids, row.response_ids])
        hidden = critic.model(ids[None]).last_hidden_state[0, len(row.prompt_ids) - 1 : -1]
        values = hidden @ critic.head.weight[0] + critic.head.bias
        clipped = row.values + (values - row.values).clamp(-0.2, 0.2)
        errors = torch.maximum((values - row.returns) ** 2, (clipped - row.returns) ** 2)
        total = total + 0.5 * errors[row.response_mask].sum()
    loss = total / sum(int(row.response_mask.sum()) for row in experiences)
    loss.backward()
    gradients, metrics = alone[VALUE_LOSS, repr(VALUE_TERMS)]
    assert metrics["train/critic/loss"] == pytest.approx(float(loss.detach()), rel=TOLERANCE)
    assert 0 < metrics["train/critic/value_clip_fraction"] < 1
    assert distance(gradients, {name: p.grad for name, p in critic.named_parameters()}) <= TOLERANCE
