"""The update's loop: what it leaves in the responses, and that no micro-batch makes the host wait for the device."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rft_trainer.algorithms import MetricMax
from rft_trainer.config import RFTConfig
from rft_trainer.experience import Collator, Experience, MicroBatchPlanner
from rft_trainer.models import Actor, load_causal_model, packed_layout
from rft_trainer.session import update_config
from rft_trainer.strategy.protocols import StepReport
from rft_trainer.testing import tiny_model_folder
from rft_trainer.trainer.collector import MetricCollector
from rft_trainer.trainer.update import PolicyUpdate

# `equal` is left out: equal prompts are found where the responses lie, on the host.
READS = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique"),
    *("__bool__", "__float__", "__int__", "__index__", "__contains__"),
}


class HostReads(TorchFunctionMode):
    """Counts calls for which the host waits on a GPU: a number or a shape that depends on the data."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        by_mask = name in ("__getitem__", "__setitem__") and any(
            isinstance(part, Tensor) and part.dtype == torch.bool
            for part in (args[1] if isinstance(args[1], tuple) else args[1:2])
        )
        if name in READS or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class Alone:
    """One rank on the CPU."""

    rank, size, device = 0, 1, torch.device("cpu")

    def sum(self, values):
        return values.detach().double()

    def most(self, value):
        return value


class Plain:
    """Plain torch; gradients are kept aside, weights stay."""

    gradients = ()

    def backward(self, state, loss, *, last):
        loss.backward()

    def optimizer_step(self, state):
        self.gradients = [p.grad.clone() for p in state.network.parameters() if p.grad is not None]
        state.network.zero_grad(set_to_none=True)
        return StepReport(grad_norm=0.0, learning_rate=0.0, skipped=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def actor(folder):
    return Actor(load_causal_model(folder))


def rows(count):
    generator = torch.Generator().manual_seed(0)
    return [
        Experience(
            group=number,
            prompt_ids=torch.randint(0, 256, (3,), generator=generator),
            response_ids=torch.randint(0, 256, (2 + number % 3,), generator=generator),
            response_mask=torch.ones(2 + number % 3, dtype=torch.bool),
            engine_log_probs=torch.full((2 + number % 3,), -5.5),
            weights_version=1,
            truncated=False,
            old_log_probs=torch.full((2 + number % 3,), -5.5),
            ref_log_probs=torch.full((2 + number % 3,), -5.4),
            advantages=torch.full((2 + number % 3,), 0.5 - number % 2),
        )
        for number in range(count)
    ]


def one_update(actor, experiences, *, backend=None, responses=2, **changes):
    chosen = {
        "init_kl_coef": 0.1,
        "entropy_coef": 0.01,
        "high_entropy_ratio": 0.5,
        "importance_sampling": "truncate",
        **changes,
    }
    config = RFTConfig(
        rollout_batch_size=4, n_samples_per_prompt=3, generate_max_len=4, micro_train_batch_size=2, **chosen
    )
    update = PolicyUpdate(
        update_config(config),
        backend=backend or Plain(),
        data=Alone(),
        planner=MicroBatchPlanner(Alone(), responses=responses, keep_order=config.share_prompts),
        collator=Collator(pad_token_id=0, device=torch.device("cpu"), layout=config.batch_layout),
        kl=config.kl_controller(),
        on_step=lambda: None,
    )
    state = actor if isinstance(actor, SimpleNamespace) else SimpleNamespace(module=actor, network=actor)
    return update(state, experiences)


def reads_of(actor, count, **changes):
    with HostReads() as reads:
        one_update(actor, rows(count), **changes)
    return len(reads.seen)


# transformers looks once at a padded batch whether its mask is full; masks of the other layouts are not looked at
@pytest.mark.parametrize(("layout", "by_transformers"), [({"share_prompts": True}, 0), ({"padding_side": "left"}, 1)])
def test_no_micro_batch_reads_a_number_from_the_device(actor, layout, by_transformers):
    few, many = reads_of(actor, 6, **layout), reads_of(actor, 12, **layout)
    assert many - few == 3 * by_transformers
    assert few > 0


def test_the_counter_sees_what_would_wait():
    values, mask = torch.arange(3.0), torch.tensor([True, False, True])
    with HostReads() as reads:
        float(values[0])
        values[mask]
        values.tolist()
        values[torch.tensor([0, 2])]
    assert reads.seen == ["__float__", "__getitem__", "tolist"]


@pytest.mark.parametrize("on_device", [False, True])
def test_scores_of_the_last_epoch_are_left_in_the_responses(actor, on_device):
    experiences = rows(4)
    one_update(actor, experiences, max_epochs=2, replay_on_device=on_device)
    for row in experiences:
        logits = actor.model(torch.cat([row.prompt_ids, row.response_ids])[None]).logits[0, 2:-1].detach()
        log_p = logits.log_softmax(-1)
        expected = log_p.gather(1, row.response_ids[:, None]).squeeze(1)
        assert torch.allclose(row.update_log_probs, expected, atol=1e-5)
        assert torch.allclose(row.update_entropies, -(log_p.exp() * log_p).sum(-1), atol=1e-5)
        assert row.update_log_probs.untyped_storage().nbytes() == 8 * len(row.response_ids)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.6, "top_p": 0.8, "top_k": 40}, {"temperature": 0.6, "first_token_temperature": 2.0}],
)
def test_the_ratio_is_one_until_the_weights_move(folder, sampling):
    actor = Actor(load_causal_model(folder), **sampling)
    experiences = rows(6)
    actor.eval()
    for row in experiences:
        row.response_mask[0] = False
        scores = actor(packed_layout([row.prompt_ids], [row.response_ids], 0)).log_probs
        row.old_log_probs = row.engine_log_probs = scores[0].detach()
    metrics = one_update(actor, experiences, padding_side="left")
    assert metrics["train/ratio_max"].value == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/gap/gap_max"].value < 1e-5
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assert one_update(actor, experiences)["train/ratio_max"].value > 1.01


def test_no_graph_of_an_earlier_micro_batch_is_alive(actor):
    alive, most = [], []

    class Watched(torch.nn.Module):
        def forward(self, layout, **options):
            most.append(sum(ref() is not None for ref in alive))
            scores = actor(layout, **options)
            alive.append(weakref.ref(scores.log_probs))
            return scores

    watched = Watched()
    one_update(SimpleNamespace(module=watched, network=actor), rows(12))
    assert len(most) == 6
    assert max(most) == 0


def test_what_is_kept_for_the_metrics_needs_no_gradient(actor, monkeypatch):
    kept = []
    read = MetricCollector._read

    def watched(collector):
        for _, metric in collector._parts:
            kept.extend([metric.value] if isinstance(metric, MetricMax) else [metric.total, metric.count])
        kept.extend(collector._losses)
        return read(collector)

    monkeypatch.setattr(MetricCollector, "_read", watched)
    one_update(actor, rows(12))
    assert len(kept) > 6
    assert [tensor for tensor in kept if tensor.requires_grad] == []


def test_without_a_coefficient_no_reference_is_read(actor):
    experiences = rows(4)
    assert "train/kl" in one_update(actor, experiences)
    for row in experiences:
        row.ref_log_probs = None
    metrics = one_update(actor, experiences, init_kl_coef=0.0)
    assert "train/kl" not in metrics
    assert metrics["train/kl_coef"].value == 0.0


def test_the_balance_of_experts_is_that_of_the_whole_mini_batch():
    """0.5 E sum_e f_e P_e over all response tokens of both layers, by hand, whatever the micro-batches."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 259, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    actor = Actor(MixtralForCausalLM(MixtralConfig(**shape, attn_implementation="sdpa")))
    experiences = rows(4)
    prompts, responses = [e.prompt_ids for e in experiences], [e.response_ids for e in experiences]
    scores = actor(packed_layout(prompts, responses, 0), with_experts=True)
    for row, counts in zip(experiences, scores.expert_counts, strict=True):
        row.expert_counts = counts
    chosen = scores.router_logits.topk(2).indices.flatten().bincount(minlength=4) / len(scores.router_logits)
    balance = 4 * (chosen * scores.router_logits.softmax(-1).mean(0)).sum().item()
    found = []
    for responses_each in (1, 2, 4):
        losses = []
        for coefficient in (0.5, 0.0):
            backend = Plain()
            metrics = one_update(
                actor, experiences, backend=backend, responses=responses_each, expert_balance_coef=coefficient
            )
            losses.append((metrics["train/loss"].value, backend.gradients))
        assert losses[0][0] - losses[1][0] == pytest.approx(0.5 * balance, rel=1e-5)
        found.append(losses[0][1])
    for gradients in found[1:]:
        for got, expected in zip(gradients, found[0], strict=True):
            assert torch.allclose(got, expected, atol=1e-6)
