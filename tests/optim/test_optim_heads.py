"""Output layers that neither a name nor a declaration shows: found by their place, or asked about."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from parbank.errors import ConfigError
from parbank.optim import split_parameters


def roles(groups: list[dict[str, Any]]) -> dict[str, str]:
    return {name: group["role"] for group in groups for name, _ in group["params"]}


class Net(nn.Module):
    """Modules by name, in order."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def _asks(model: nn.Module, *names: str) -> None:
    """The error names these weights, and its own remedy puts them, and them alone, beside the embeddings."""
    with pytest.raises(ConfigError, match="may be the output layer") as caught:
        split_parameters(model)
    overrides = dict(re.findall(r'"([\w.]+)": "(adamw)"', str(caught.value)))
    assert tuple(overrides) == names
    found = roles(split_parameters(model, overrides=overrides))
    assert all(found[name] == "embeddings and heads" for name in names)
    plain = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and min(m.weight.shape) > 1]
    others = [name for name in plain if f"{name}.weight" in found and f"{name}.weight" not in names]
    assert all(found[f"{name}.weight"] == "matrices" for name in others)
    muon = split_parameters(model, overrides=dict.fromkeys(overrides, "muon"))
    assert all(roles(muon)[name] == "matrices" for name in names)


def test_a_new_head_on_a_frozen_backbone() -> None:
    """Transfer learning: the frozen convolutions show that the only Linear is the head."""
    model = Net(conv=nn.Conv2d(3, 64, 3), fc=nn.Linear(64, 10)).requires_grad_(False)
    model.fc = nn.Linear(64, 2)
    assert roles(split_parameters(model)) == {
        "fc.weight": "embeddings and heads",
        "fc.bias": "norms, biases, gates and scalars",
    }
    hidden = [nn.Linear(64, 64) for _ in range(3)]
    frozen = Net(table=nn.Embedding(99, 64), hidden=nn.ModuleList(hidden)).requires_grad_(False)
    frozen.add_module("fc", nn.Linear(64, 2))
    _asks(frozen, "fc.weight")


def test_a_frozen_head_needs_no_answer() -> None:
    model = Net(hidden=nn.ModuleList([nn.Linear(8, 8) for _ in range(2)]), out=nn.Linear(8, 3))
    model.out.requires_grad_(False)  # type: ignore[union-attr]
    assert set(roles(split_parameters(model)).values()) == {"matrices", "norms, biases, gates and scalars"}


def test_a_linear_alone() -> None:
    _asks(Net(fc=nn.Linear(10, 3)), "fc.weight")
    _asks(Net(lstm=nn.LSTM(10, 8), fc=nn.Linear(8, 3)), "fc.weight")


def test_an_actor_and_a_critic() -> None:
    """The critic has one output and is small, whatever it is; the actor is the last matrix."""
    model = Net(first=nn.Linear(64, 64), second=nn.Linear(64, 64), actor=nn.Linear(64, 4), critic=nn.Linear(64, 1))
    _asks(model, "actor.weight")


def test_two_heads_of_one_shape() -> None:
    model = Net(first=nn.Linear(64, 64), second=nn.Linear(64, 64), a=nn.Linear(64, 10), b=nn.Linear(64, 10))
    _asks(model, "a.weight", "b.weight")
    with pytest.raises(ConfigError, match=r"b.weight .* beside a head"):
        split_parameters(model, overrides={"a.weight": "adamw"})


def test_an_answer_about_a_hidden_matrix_is_no_answer_about_its_neighbour() -> None:
    layers = [Net(gate_proj=nn.Linear(8, 24), up_proj=nn.Linear(8, 24), down_proj=nn.Linear(24, 8)) for _ in range(2)]
    model = Net(layers=nn.ModuleList(layers))
    found = roles(split_parameters(model, overrides={"*.up_proj.weight": "adamw"}))
    assert found["layers.1.gate_proj.weight"] == found["layers.1.down_proj.weight"] == "matrices"


def test_as_many_channels_as_bytes() -> None:
    """The head has the shape of every hidden matrix, and its name says nothing."""
    blocks = nn.ModuleList([nn.Linear(256, 256) for _ in range(4)])
    _asks(Net(table=nn.Embedding(256, 256), blocks=blocks, out=nn.Linear(256, 256)), "out.weight")
    layers = nn.ModuleList([Net(q=nn.Linear(256, 256), out=nn.Linear(256, 256)) for _ in range(2)])
    found = roles(split_parameters(Net(table=nn.Embedding(256, 256), layers=layers)))
    assert found["layers.1.out.weight"] == "matrices", "in every layer: hidden"


def test_heads_for_several_tokens() -> None:
    parts = {"table": nn.Embedding(100, 64), "hidden": nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])}
    listed = Net(**parts, heads=nn.ModuleList([nn.Linear(64, 100) for _ in range(3)]))
    found = roles(split_parameters(listed))
    assert [found[f"heads.{n}.weight"] for n in range(3)] == ["embeddings and heads"] * 3
    assert [found[f"hidden.{n}.weight"] for n in range(3)] == ["matrices"] * 3
    found = roles(split_parameters(Net(**parts, now=nn.Linear(64, 100), next=nn.Linear(64, 100))))
    assert found["now.weight"] == found["next.weight"] == "embeddings and heads"


def test_layers_of_a_sequence_are_not_heads_side_by_side() -> None:
    """The first Linear has an output for each token, too, but the next one follows it."""
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 256))
    found = roles(split_parameters(model))
    assert [found[f"{n}.weight"] for n in (1, 2, 3)] == ["matrices", "matrices", "embeddings and heads"]


def test_equal_layers_are_hidden() -> None:
    found = roles(split_parameters(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])))
    assert [found[f"{n}.weight"] for n in range(3)] == ["matrices"] * 3


@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
def test_spectral_norm_of_both_kinds() -> None:
    for norm in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        model = Net(normed=norm(nn.Linear(8, 8)), head=nn.Linear(8, 2))  # type: ignore[operator]
        assert "other weights" in roles(split_parameters(model)).values()


@pytest.mark.parametrize("name", ["weight", "_flat_param"])
def test_weights_that_a_wrapper_has_flattened_are_refused(name: str) -> None:
    """FSDP1, with use_orig_params and without."""
    model = Net(first=nn.Linear(8, 8, bias=False), head=nn.Linear(8, 2))
    del model.first.weight  # type: ignore[union-attr]
    model.first.register_parameter(name, nn.Parameter(torch.zeros(32)))  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=rf"first.{name} has shape \(32,\): FSDP1 .* Use FSDP2"):
        split_parameters(model)
