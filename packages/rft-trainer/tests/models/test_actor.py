"""The Actor's scores against the model's own logits."""

import pytest
import torch
from torch import nn

from rft_trainer.errors import ConfigurationError, UnsupportedCombination
from rft_trainer.models import Actor, load_causal_model, packed_layout, padded_layout, shared_prompt_layout
from rft_trainer.testing import tiny_model_folder

# Two groups; one response is empty.
ROWS = [([5, 6, 7], [8, 9]), ([5, 6, 7], []), ([5, 6, 7], [40]), ([11, 12], [13, 14, 15, 16]), ([11, 12], [13, 90])]
LAYOUTS = {
    "right": padded_layout,
    "left": lambda prompts, responses, pad: padded_layout(prompts, responses, pad, side="left"),
    "shared": shared_prompt_layout,
    "packed": packed_layout,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def layout(kind):
    return LAYOUTS[kind]([torch.tensor(p) for p, _ in ROWS], [torch.tensor(r, dtype=torch.long) for _, r in ROWS], 257)


def naive(model, temperature=1.0):
    """Each row alone, full logits, log-softmax."""
    found = []
    for prompt, response in ROWS:
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        log_softmax = (logits / temperature).log_softmax(-1)
        scores = log_softmax.gather(1, torch.tensor(response, dtype=torch.long)[:, None]).squeeze(1)
        found.append((scores, -(log_softmax.exp() * log_softmax).sum(-1)))
    return found


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_equal_full_logits_in_every_layout(folder, kind, temperature):
    model = load_causal_model(folder)
    expected = naive(model, temperature)
    rows = layout(kind)
    scores = Actor(model, temperature=temperature)(rows)
    assert rows.mask.sum(-1).tolist() == [2, 0, 1, 4, 2]
    for row, (log_probs, entropy) in enumerate(expected):
        count = len(log_probs)
        assert torch.allclose(scores.log_probs[row, :count], log_probs, atol=1e-5)
        assert torch.allclose(scores.entropy[row, :count], entropy, atol=1e-5)
        assert scores.log_probs[row, count:].tolist() == [0.0] * (rows.mask.shape[1] - count)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_gradient_equals_that_of_full_logits_in_every_layout(folder, kind, recompute):
    weights = torch.tensor([1.0, 2.0, -1.5, 0.5, 3.0])
    plain = load_causal_model(folder)
    torch.stack([w * scores.sum() for w, (scores, _) in zip(weights, naive(plain), strict=True)]).sum().backward()
    scored = load_causal_model(folder)
    actor = Actor(scored).train()
    if recompute:
        actor.checkpoint_activations()
    (actor(layout(kind)).log_probs * weights[:, None]).sum().backward()
    for (name, expected), (_, got) in zip(plain.named_parameters(), scored.named_parameters(), strict=True):
        assert torch.allclose(got.grad, expected.grad, atol=1e-4), name


def test_responses_to_one_prompt_share_its_tokens():
    rows = layout("shared")
    assert rows.input_ids.tolist() == [[5, 6, 7, 8, 9, 40, 257, 257], [11, 12, 13, 14, 15, 16, 13, 90]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 0], [0, 1, 2, 3, 4, 5, 2, 3]]
    # the second response of the second prompt: predicted from the prompt's end, blind to the first response
    assert rows.predictors[4, :2].tolist() == [8 + 1, 8 + 6]
    assert rows.attention_mask[1, 0, 7].tolist() == [True, True, False, False, False, False, True, True]


@pytest.mark.parametrize(("side", "positions"), [("left", [0, 0, 0, 1]), ("right", [0, 1, 0, 0])])
def test_positions_count_real_tokens_only(side, positions):
    rows = padded_layout(
        [torch.tensor([1]), torch.tensor([1, 2, 3])], [torch.tensor([2]), torch.tensor([4])], 0, side=side
    )
    assert rows.position_ids[0].tolist() == positions
    assert rows.position_ids.dtype == torch.long


def test_the_tie_between_embedding_and_head_survives(folder):
    model = load_causal_model(folder)
    Actor(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(torch.tensor([[5, 6]])).logits.shape == (1, 2, 259)


def test_an_empty_prompt_is_refused():
    for arrange in LAYOUTS.values():
        with pytest.raises(ValueError, match="prompt is empty"):
            arrange([torch.tensor([], dtype=torch.long)], [torch.tensor([1])], 0)


def test_a_head_that_is_not_linear_is_refused():
    class Scaled(nn.Linear):
        pass

    class Model(nn.Module):
        def get_output_embeddings(self):
            return Scaled(2, 2)

    with pytest.raises(UnsupportedCombination, match=r"Scaled.*log-probabilities"):
        Actor(Model())


def test_freeze_names_are_checkpoint_names(folder):
    actor = Actor(load_causal_model(folder))
    frozen = actor.freeze(["model.embed_tokens", "model.layers.0"])
    assert "model.embed_tokens.weight" in frozen
    assert all(name.startswith(("model.embed_tokens", "model.layers.0.")) for name in frozen)
    with pytest.raises(ConfigurationError, match="matches no parameter"):
        actor.freeze(["model.layers.9"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: [w.unlink() for w in f.glob("*.safetensors")], "safetensors"),
    ],
)
def test_a_broken_model_folder_is_named(tmp_path, spoil, message):
    folder = tiny_model_folder(tmp_path / "tiny")
    spoil(folder)
    with pytest.raises(ConfigurationError, match=message):
        load_causal_model(str(folder))
    with pytest.raises(ConfigurationError, match="no such folder"):
        load_causal_model(str(tmp_path / "absent"))
