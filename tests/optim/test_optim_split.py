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
        (nn.ModuleDict({"gate": nn.Linear(128, 64), "head": nn.Linear(128, 2)}), "gate.weight"),
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


class NanoBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)


class Nano(nn.Module):
    """nanoGPT's layout, with as many positions as the MLP has channels."""

    def __init__(self, tied: bool, width: int = 16, vocab: int = 100) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab, width),
            "wpe": nn.Embedding(4 * width, width),
            "h": nn.ModuleList([NanoBlock(width) for _ in range(2)]),
        })  # fmt: skip
        self.decode = nn.Linear(width, vocab, bias=False)
        if tied:
            self.decode.weight = self.transformer["wte"].weight


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_of_positions_is_no_vocabulary(tied: bool) -> None:
    found = roles(split_parameters(Nano(tied)))
    matrices = [name for name, role in found.items() if role == "matrices"]
    assert len(matrices) == 6, "c_attn, c_fc and c_proj of two blocks"
    assert tied or found["decode.weight"] == "embeddings and heads"


def test_position_tables_of_bert() -> None:
    """As many positions as channels, and no head: output.dense is hidden, in every layer."""
    dense = {"query": nn.Linear(32, 32), "output": nn.ModuleDict({"dense": nn.Linear(64, 32)})}
    tables = {"word_embeddings": nn.Embedding(99, 32), "position_embeddings": nn.Embedding(32, 32)}
    parts = {"embeddings": nn.ModuleDict(tables), "layer": nn.ModuleList([nn.ModuleDict(dense)])}
    model = nn.ModuleDict({**parts, "pooler": nn.Linear(32, 32)})
    found = roles(split_parameters(model))
    assert {found[name] for name in ("layer.0.output.dense.weight", "pooler.weight")} == {"matrices"}


def test_the_only_linear_of_a_convolutional_net_is_its_head() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 10))
    found = roles(split_parameters(model))
    assert found["3.weight"] == "embeddings and heads"
    assert found["1.weight"] == "convolutions"


class Experts(nn.Module):
    def __init__(self, inputs_first: bool, flag: bool | None = None, width: int = 16, hidden: int = 24) -> None:
        super().__init__()
        up, down = (width, 2 * hidden), (hidden, width)
        self.gate_up_proj = nn.Parameter(torch.randn(4, *(up if inputs_first else up[::-1])))
        self.down_proj = nn.Parameter(torch.randn(4, *(down if inputs_first else down[::-1])))
        if flag is not None:
            self.is_transposed = flag


class Mixture(nn.Module):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(128, 100, bias=False)  # many experts: not thin
        self.experts = Experts(*args, **options)
        self.lm_head = nn.Linear(16, 50)


@pytest.mark.parametrize("inputs_first", [False, True])
def test_experts_that_are_stored_inputs_first_are_marked(inputs_first: bool) -> None:
    groups = split_parameters(Mixture(inputs_first))
    found = roles(groups)
    expected = "transposed matrices" if inputs_first else "matrices"
    assert found["experts.gate_up_proj"] == found["experts.down_proj"] == expected
    assert found["gate.weight"] == "norms, biases, gates and scalars", "a router"
    if inputs_first:
        assert next(g["transposed"] for g in groups if g["role"] == expected) == (True,) * 4
    ParallelMuon(groups)


@pytest.mark.parametrize(("width", "hidden"), [(16, 24), (24, 16)])
@pytest.mark.parametrize("inputs_first", [False, True])
def test_a_router_shows_how_experts_of_two_layers_are_stored(inputs_first: bool, width: int, hidden: int) -> None:
    """Each of the two weights is shaped like the other's transpose."""
    up, down = ((width, hidden), (hidden, width)) if inputs_first else ((hidden, width), (width, hidden))
    experts = nn.ParameterDict({"w1": torch.zeros(4, *up), "w2": torch.zeros(4, *down), "w3": torch.zeros(4, *up)})
    found = roles(split_parameters(nn.ModuleDict({"router": nn.Linear(width, 4), "experts": experts})))
    assert {found[f"experts.w{n}"] for n in (1, 2, 3)} == {"transposed matrices" if inputs_first else "matrices"}


def test_experts_may_say_how_they_are_stored() -> None:
    """Square stacks: only the module knows."""
    for flag, expected in ((True, "transposed matrices"), (False, "matrices")):
        assert roles(split_parameters(Mixture(False, flag=flag, width=16, hidden=8)))["experts.down_proj"] == expected


def test_common_parameters_that_are_no_hidden_matrices() -> None:
    model = nn.ModuleDict({
        "lstm": nn.LSTM(8, 8), "cell": nn.GRUCell(8, 8), "up": nn.ConvTranspose1d(8, 8, 3),
        "normed": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "mixer": nn.Module(), "head": nn.Linear(8, 2),
    })  # fmt: skip
    model["mixer"].A_log = nn.Parameter(torch.ones(8, 4))
    model["mixer"].rel_pos_h = nn.Parameter(torch.ones(8, 4))
    groups = split_parameters(model)
    found = roles(groups)
    assert {name for name, role in found.items() if role == "other weights"} == {
        "lstm.weight_ih_l0", "lstm.weight_hh_l0", "cell.weight_ih", "cell.weight_hh", "up.weight", "mixer.A_log",
        "mixer.rel_pos_h", "normed.parametrizations.weight.original1",
    }  # fmt: skip
    assert not [group for group in groups if group["algorithm"] == "muon"]
    ParallelMuon(groups)


def test_works_through_the_prefixes_of_wrappers() -> None:
    model = Transformer()
    plain = roles(split_parameters(model))
    for block in model.blocks:
        block.compile()
    model.blocks[0] = torch.compile(model.blocks[0])
    model.final = torch.compile(model.final)
    compiled = torch.compile(model)
    assert any("_orig_mod" in name for name, _ in compiled.named_parameters())
    assert roles(split_parameters(compiled)) == plain
    found = roles(split_parameters(compiled, overrides={"blocks.0.attention.qkv.weight": "adamw"}))
    assert found["blocks.0.attention.qkv.weight"] == "embeddings and heads"


def test_what_a_model_declares_goes_first() -> None:
    class Declaring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 16)
            self.hidden = nn.Linear(16, 16)
            self.out = nn.Linear(16, 5)

        def get_input_embeddings(self) -> nn.Module:
            return self.stem

        def get_output_embeddings(self) -> None:
            raise NotImplementedError

        def get_classifier(self) -> nn.Module:
            return self.out

    found = roles(split_parameters(Declaring()))
    assert found["stem.weight"] == found["out.weight"] == "embeddings and heads"
    assert found["hidden.weight"] == "matrices"
