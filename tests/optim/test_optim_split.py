"""Roles: what goes to Muon and what to AdamW, for the models people have."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon, split_parameters


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)  # named like a head, but one in every layer
        self.head_gate = nn.Linear(width, 4)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.gate_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)
        self.skip_scale = nn.Parameter(torch.ones(width))
        self.register_parameter("mix", nn.Parameter(torch.ones(1, 1, width)))


class Transformer(nn.Module):
    def __init__(self, width: int = 32, vocab: int = 100, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.pos_embed = nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.bank = nn.Parameter(torch.randn(3, width, width))
        self.conv = nn.Conv1d(width, width, 3)
        self.depthwise = nn.Conv2d(width, width, 3, groups=width)
        self.final = nn.Linear(width, vocab, bias=False)
        if tied:
            self.final.weight = self.tokens.weight


def roles(groups: list[dict[str, Any]]) -> dict[str, str]:
    return {name: group["role"] for group in groups for name, _ in group["params"]}


def test_a_transformer() -> None:
    groups = split_parameters(Transformer(), lr=0.02, adam_lr=3e-4)
    found = roles(groups)
    small = "norms, biases, gates and scalars"
    expected = {
        "tokens.weight": "embeddings and heads",
        "pos_embed": "embeddings and heads",
        "final.weight": "embeddings and heads",
        "bank": "matrices",
        "conv.weight": "convolutions",
        "conv.bias": small,
        "depthwise.weight": small,
        "depthwise.bias": small,
    }
    for i in (0, 1):
        for name in ("attention.qkv.weight", "attention.output.weight", "gate_proj.weight", "down_proj.weight"):
            expected[f"blocks.{i}.{name}"] = "matrices"
        for name in (
            "norm.weight",
            "norm.bias",
            "attention.qkv.bias",
            "attention.output.bias",
            "attention.head_gate.weight",
        ):
            expected[f"blocks.{i}.{name}"] = small
        for name in ("attention.head_gate.bias", "skip_scale", "mix"):
            expected[f"blocks.{i}.{name}"] = small
    assert found == expected
    optimizer = ParallelMuon(groups, weight_decay=0.01)
    by_role = {group["role"]: group for group in optimizer.param_groups}
    assert (by_role["matrices"]["lr"], by_role["matrices"]["weight_decay"]) == (0.02, 0.01)
    assert (by_role["embeddings and heads"]["lr"], by_role["embeddings and heads"]["weight_decay"]) == (3e-4, 0.01)
    assert by_role[small]["weight_decay"] == 0.0
    assert by_role["convolutions"]["flatten"]


def test_a_tied_head_is_an_embedding() -> None:
    found = roles(split_parameters(Transformer(tied=True)))
    assert found["tokens.weight"] == "embeddings and heads"
    assert "final.weight" not in found


def test_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="parbank"):
        split_parameters(Transformer())
    assert "muon: 9 matrices" in caplog.text
    assert "blocks.0.attention.qkv.weight" in caplog.text


def test_known_modules_of_others() -> None:
    class Conv1D(nn.Module):  # transformers' GPT-2 keeps its weights as (in, out)
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 24))

    model = nn.ModuleDict({"joint": nn.MultiheadAttention(8, 2), "c_attn": Conv1D(), "lm_head": nn.Linear(8, 50)})
    groups = {group["role"]: group for group in split_parameters(model)}
    assert groups["transposed matrices"]["transposed"] == (True,)
    assert groups["joint query, key and value"]["num_heads"] == 3
    assert [name for name, _ in groups["embeddings and heads"]["params"]] == ["lm_head.weight"]
    ParallelMuon(list(groups.values()))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), "2.weight"),
        (nn.LSTM(4, 8), "weight_ih_l0"),
        (nn.ModuleDict({"gate": nn.Linear(128, 128), "head": nn.Linear(128, 2)}), "gate.weight"),
        (nn.ParameterDict({"table": nn.Parameter(torch.ones(4, 4))}), "table"),
    ],
)
def test_refuses_what_it_cannot_tell_apart(model: nn.Module, name: str) -> None:
    with pytest.raises(ConfigError, match="overrides") as caught:
        split_parameters(model)
    assert name in str(caught.value)


def test_the_remedy_works() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    assert roles(split_parameters(model, overrides={"2.weight": "adamw"}))["2.weight"] == "embeddings and heads"
    assert roles(split_parameters(model, overrides={"*.weight": "muon"}))["2.weight"] == "matrices"
    lstm = nn.LSTM(4, 8)
    assert set(roles(split_parameters(lstm, overrides={"weight_*": "adamw"}))) == {
        n for n, _ in lstm.named_parameters()
    }


def test_refuses_overrides_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        split_parameters(nn.Linear(4, 4), overrides={"tpyo": "adamw"})
    with pytest.raises(ConfigError, match="must be one of muon, adamw"):
        split_parameters(nn.Linear(4, 4), overrides={"weight": "sgd"})


def test_frozen_parameters_are_left_out() -> None:
    model = Transformer()
    model.bank.requires_grad_(False)
    assert "bank" not in roles(split_parameters(model))
