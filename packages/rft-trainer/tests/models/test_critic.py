"""Values are read where a token is about to be chosen, alike in every layout; training mode changes no number."""

import pytest
import torch
from torch import nn

from rft_trainer.models import Actor, Critic, load_causal_model, packed_layout, padded_layout, shared_prompt_layout
from rft_trainer.testing import tiny_model_folder

PROMPTS = [torch.tensor([5, 6, 7]), torch.tensor([5, 6, 7]), torch.tensor([9])]
RESPONSES = [torch.tensor([8, 9]), torch.tensor([1, 2, 3]), torch.tensor([4])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def critic(folder):
    made = Critic(load_causal_model(folder))
    nn.init.normal_(made.head.weight, generator=torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize("arrange", [padded_layout, packed_layout, shared_prompt_layout])
def test_values_stand_before_their_tokens(folder, arrange):
    made = critic(folder)
    values = made(arrange(PROMPTS, RESPONSES, 0)).values
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        hidden = made.model(input_ids=torch.cat([prompt, response])[None])[0][0]
        expected = made.head(hidden[len(prompt) - 1 : -1])
        assert torch.allclose(values[row, : len(response)], expected, atol=1e-5)
        assert not values[row, len(response) :].any()


def test_a_fresh_critic_expects_nothing(folder):
    values = Critic(load_causal_model(folder))(padded_layout(PROMPTS, RESPONSES, 0)).values
    assert not values.any()
    assert values.requires_grad


def test_training_mode_scores_as_evaluation_mode(folder):
    """With dropout in the checkpoint an on-policy ratio would not be 1."""
    model = load_causal_model(folder)
    model.config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model.model.layers[0].mlp.act_fn = nn.Sequential(model.model.layers[0].mlp.act_fn, nn.Dropout(0.5))
    model.model.layers[1].mlp.activation_dropout = 0.5
    actor, layout = Actor(model), padded_layout(PROMPTS, RESPONSES, 0)
    assert model.model.layers[1].mlp.activation_dropout == 0.0
    scored = actor.eval()(layout).log_probs
    assert torch.equal(actor.train()(layout).log_probs, scored)
    assert actor.training


def test_greedy_rollouts_are_scored_under_the_full_distribution():
    greedy = Actor.scoring_of(temperature=0.0, top_p=0.5, top_k=3)
    assert greedy == {"temperature": 1.0, "top_p": 1.0, "top_k": None, "first_token_temperature": None}
    sampled = Actor.scoring_of(temperature=0.6, top_p=0.5, top_k=0, first_token_temperature=2.0)
    assert sampled == {"temperature": 0.6, "top_p": 0.5, "top_k": None, "first_token_temperature": 2.0}
