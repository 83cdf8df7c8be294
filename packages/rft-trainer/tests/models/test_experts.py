"""The balance of experts: counts by response, alike in every layout, and parts that add up to the whole."""

import pytest
import torch

from rft_trainer.algorithms import expert_balance_loss
from rft_trainer.models import Actor, packed_layout, padded_layout

PROMPTS = [torch.tensor([5, 6, 7]), torch.tensor([8, 9]), torch.tensor([10])]
RESPONSES = [torch.tensor([1, 2, 3, 4]), torch.tensor([11]), torch.tensor([12, 13])]
EXPERTS, CHOSEN, LAYERS, TOKENS = 4, 2, 2, 7


@pytest.fixture(scope="module")
def actor():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        attn_implementation="sdpa",
    )
    return Actor(MixtralForCausalLM(config)).eval()


@pytest.mark.parametrize("arrange", [padded_layout, packed_layout])
def test_counts_by_response(actor, arrange):
    scores = actor(arrange(PROMPTS, RESPONSES, 0), with_experts=True)
    assert scores.router_logits.shape == (LAYERS * TOKENS, EXPERTS)
    assert scores.expert_counts.sum(dim=1).tolist() == [CHOSEN * LAYERS * len(r) for r in RESPONSES]
    for row in range(3):
        alone = actor(arrange(PROMPTS[row : row + 1], RESPONSES[row : row + 1], 0), with_experts=True)
        assert torch.equal(alone.expert_counts[0], scores.expert_counts[row])


def test_parts_add_up_to_the_whole(actor):
    def part(rows):
        scores = actor(padded_layout(PROMPTS[rows], RESPONSES[rows], 0), with_experts=True)
        logits = scores.router_logits
        loss = expert_balance_loss(logits, torch.ones(len(logits)), counts, LAYERS * TOKENS)
        actor.zero_grad()
        loss.backward()
        return float(loss.detach()), [p.grad.clone() for p in actor.parameters() if p.grad is not None]

    counts = actor(padded_layout(PROMPTS, RESPONSES, 0), with_experts=True).expert_counts.sum(dim=0)
    whole, gradient = part(slice(0, 3))
    (first, first_gradient), (second, second_gradient) = part(slice(0, 1)), part(slice(1, 3))
    assert first + second == pytest.approx(whole, rel=1e-6)
    for total, left, right in zip(gradient, first_gradient, second_gradient, strict=True):
        assert torch.allclose(left + right, total, atol=1e-6)


def test_a_dense_model_has_no_experts(tmp_path):
    from rft_trainer.models import load_causal_model
    from rft_trainer.testing import tiny_model_folder

    assert Actor(load_causal_model(str(tiny_model_folder(tmp_path / "tiny")))).experts is None
