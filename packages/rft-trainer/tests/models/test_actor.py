"""The Actor's scores against the model's own logits."""

import pytest
import torch
from rft_trainer.errors import ConfigurationError, UnsupportedCombination
from rft_trainer.models import Actor, load_causal_model
from rft_trainer.testing import tiny_model_folder
from torch import nn

ROWS = [([5, 6, 7], [8, 9]), ([11, 12], [13, 14, 15, 16])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model") / "tiny"))


def padded(side):
    width = max(len(p) + len(r) for p, r in ROWS)
    ids, real, marks = [], [], []
    for prompt, response in ROWS:
        pad = width - len(prompt) - len(response)
        row = [*prompt, *response]
        mark = [False] * len(prompt) + [True] * len(response)
        before, after = (pad, 0) if side == "left" else (0, pad)
        ids.append([0] * before + row + [0] * after)
        real.append([False] * before + [True] * len(row) + [False] * after)
        marks.append([False] * before + mark + [False] * after)
    return torch.tensor(ids), torch.tensor(real), torch.tensor(marks)


def naive(model, temperature=1.0):
    """Each row alone, full logits, log-softmax."""
    found = []
    for prompt, response in ROWS:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        log_softmax = (logits / temperature).log_softmax(-1)
        scores = log_softmax.gather(1, torch.tensor(response)[:, None]).squeeze(1)
        found.append((scores, -(log_softmax.exp() * log_softmax).sum(-1)))
    return found


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_equal_full_logits_whatever_the_padding_side(folder, side, temperature):
    model = load_causal_model(folder)
    expected = naive(model, temperature)
    scores = Actor(model, temperature=temperature)(*padded(side))
    assert scores.mask.tolist() == [[True, True, False, False], [True] * 4]
    for row, (log_probs, entropy) in enumerate(expected):
        count = len(log_probs)
        assert torch.allclose(scores.log_probs[row, :count], log_probs, atol=1e-5)
        assert torch.allclose(scores.entropy[row, :count], entropy, atol=1e-5)
        assert scores.log_probs[row, count:].tolist() == [0.0] * (scores.mask.shape[1] - count)


def test_gradient_equals_that_of_full_logits(folder):
    plain = load_causal_model(folder)
    total = torch.zeros(())
    for prompt, response in ROWS:
        logits = plain(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        total = total + logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum()
    total.backward()
    scored = load_causal_model(folder)
    Actor(scored)(*padded("left")).log_probs.sum().backward()
    for (name, expected), (_, got) in zip(plain.named_parameters(), scored.named_parameters(), strict=True):
        assert torch.allclose(got.grad, expected.grad, atol=1e-4), name


def test_the_tie_between_embedding_and_head_survives(folder):
    model = load_causal_model(folder)
    Actor(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(torch.tensor([[5, 6]])).logits.shape == (1, 2, 259)


def test_marks_on_padding_or_on_a_first_token_are_refused(folder):
    actor = Actor(load_causal_model(folder))
    ids, real, marks = padded("left")
    first = marks.clone()
    first[1, int(real[1].int().argmax())] = True
    with pytest.raises(ValueError, match="first token"):
        actor(ids, real, first)
    ids, real, marks = padded("right")
    with pytest.raises(ValueError, match="padding"):
        actor(ids, real, marks | ~real)
    with pytest.raises(ValueError, match="one shape"):
        actor(ids, real[:, 1:], marks)


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
