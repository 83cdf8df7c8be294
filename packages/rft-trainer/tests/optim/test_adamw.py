import pytest
import torch
from torch import nn

from rft_trainer.errors import ConfigurationError
from rft_trainer.optim import AdamWConfig, begin_state, build_adamw, freeze_prefixes, parameter_groups


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(11)])
        self.norm = nn.LayerNorm(4)


def _names(module, parameters):
    by_id = {id(parameter): name for name, parameter in module.named_parameters()}
    return [by_id[id(parameter)] for parameter in parameters]


def test_vectors_and_named_parameters_get_no_decay():
    module = Small()
    groups = parameter_groups(module.named_parameters(), AdamWConfig(weight_decay=0.1, no_decay=("embed",)))
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert _names(module, groups[0]["params"]) == [f"layers.{index}.weight" for index in range(11)]
    assert "embed.weight" in _names(module, groups[1]["params"])
    assert "norm.weight" in _names(module, groups[1]["params"])
    assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))


def test_prefix_ends_at_a_dot():
    module = Small()
    assert freeze_prefixes(module, ["layers.1", "embed"]) == ["embed.weight", "layers.1.weight", "layers.1.bias"]
    assert module.layers[10].weight.requires_grad
    groups = parameter_groups(module.named_parameters(), AdamWConfig())
    names = [name for group in groups for name in _names(module, group["params"])]
    assert "layers.1.weight" not in names
    assert "layers.10.weight" in names


def test_prefix_that_matches_nothing_raises():
    with pytest.raises(ConfigurationError, match=r"'model\.layers'.*embed\.weight"):
        freeze_prefixes(Small(), ["model.layers"])
    with pytest.raises(ConfigurationError, match="leave no parameter"):
        freeze_prefixes(Small(), ["embed", "layers", "norm"])


def test_first_step_moves_each_weight_by_the_rate():
    module = nn.Linear(2, 1, bias=False)
    start = module.weight.detach().clone()
    optimizer = build_adamw(module, AdamWConfig(lr=0.01))
    (module.weight * torch.tensor([[3.0, -0.5]])).sum().backward()
    optimizer.step()
    # bias-corrected averages of one gradient g are g and g^2: the step is lr * sign(g)
    torch.testing.assert_close(module.weight.detach(), start - 0.01 * torch.tensor([[1.0, -1.0]]))


def test_weight_decay_is_decoupled():
    module = nn.Linear(2, 1)
    start = module.weight.detach().clone(), module.bias.detach().clone()
    optimizer = build_adamw(module, AdamWConfig(lr=0.1, weight_decay=0.5))
    (module.weight.sum() * 0 + module.bias.sum() * 0).backward()
    optimizer.step()
    torch.testing.assert_close(module.weight.detach(), start[0] * (1 - 0.1 * 0.5))
    torch.testing.assert_close(module.bias.detach(), start[1])


def test_nothing_to_train_raises():
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        build_adamw(nn.Linear(2, 1).requires_grad_(False), AdamWConfig())


@pytest.mark.parametrize(
    ("changes", "message"), [({"lr": -1.0}, "lr"), ({"betas": (0.9, 1.0)}, "betas"), ({"eps": 0.0}, "eps")]
)
def test_numbers_out_of_range_name_themselves(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        AdamWConfig(**changes)


def test_a_state_that_is_begun_counts_no_step_and_changes_none():
    """Torch's checkpoint functions would make it by a step that is counted."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def stepped(prepare):
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        optimizer = build_adamw(layer, AdamWConfig(lr=0.1, weight_decay=0.1))
        prepare(layer, optimizer)
        for _ in range(2):
            layer(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])

    def read(layer, optimizer):
        begin_state(optimizer)
        assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}
        _, found = get_state_dict(layer, optimizer)
        assert {float(state["step"]) for state in found["state"].values()} == {0.0}

    plain = stepped(lambda layer, optimizer: None)
    assert torch.equal(stepped(read), plain)
    assert not torch.equal(stepped(get_state_dict), plain)  # what the function is for
