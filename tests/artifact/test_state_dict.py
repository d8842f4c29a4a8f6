"""Anybody's state dict through an artifact and back: what is exact, what is stored once, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbank.artifact.container import decode_artifact, encode_artifact
from parbank.artifact.module import roles_in, transposed_in
from parbank.artifact.pack import describe_tensors
from parbank.artifact.state_dict import pack_state_dict, split_state_dict, unpack_state_dict
from parbank.errors import ArtifactError
from parbank.model import GPT
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig
from parbank.quant.roles import role
from parbank.recipes import RECIPES, get_recipe


class Strange(nn.Module):
    """What models of this world have beside matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, 32)
        self.stack = nn.Parameter(torch.randn(3, 24, 32))
        self.conv = nn.Conv1d(32, 40, 3)
        self.norm = nn.BatchNorm1d(40)  # holds an integer: num_batches_tracked
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(32, 50, bias=False)
        self.out.weight = self.wte.weight
        self.register_buffer("ids", torch.arange(-5, 300))
        self.register_buffer("mask", torch.ones(20, 20, dtype=torch.bool).tril())
        self.register_buffer("bias", torch.zeros(20, 20).masked_fill(~torch.ones(20, 20).bool().tril(), -torch.inf))
        self.register_buffer("rotations", torch.randn(64, 32))
        self.register_buffer("nothing", torch.zeros(0, 4))


def strange() -> Strange:
    torch.manual_seed(0)
    return Strange()


def pack(state: dict[str, Tensor], roles: Any = None, max_bytes: int = 20_000, **settings: Any) -> bytes:
    packed = pack_state_dict(
        split_state_dict(state, roles), QuantConfig(**settings), Calibration(), max_bytes=max_bytes
    )
    assert packed.size <= max_bytes
    return packed.data


def test_everything_comes_back() -> None:
    module = strange()
    before = module.state_dict()
    after = unpack_state_dict(decode_artifact(pack(before, roles_in(module))))
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
    for name in ("ids", "mask", "bias", "norm.num_batches_tracked"):
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name]), name
    for name, tensor in before.items():
        if tensor.is_floating_point() and name != "bias" and tensor.numel():
            error = (after[name] - tensor).square().mean() / tensor.square().mean().clamp(min=1e-9)
            assert error < 1e-3, name
    assert torch.equal(after["rotations"], before["rotations"].half().float()), "a buffer is no weight to round"
    assert after["out.weight"] is after["wte.weight"]
    other = strange()
    assert str(other.load_state_dict(after)) == "<All keys matched successfully>"


def test_a_tied_weight_is_stored_once_and_a_stack_matrix_by_matrix() -> None:
    module = strange()
    rows = {row.name: row for row in describe_tensors(decode_artifact(pack(module.state_dict(), roles_in(module))))}
    assert "wte.weight" not in rows
    assert rows["out.weight"].role == "embedding"
    by_name = {"lm_head.weight": (table := torch.randn(64, 32)), "wte.weight": table}
    assert split_state_dict(by_name).roles == {"lm_head.weight": "embedding"}, "by any of its names"
    assert [rows[f"stack[{i}]"].shape for i in range(3)] == [(24, 32)] * 3
    assert rows["conv.weight"].shape == (40, 96)
    assert rows["conv.weight"].levels > 0
    assert rows["rotations"].levels == 0
    tied = {"a": torch.randn(64, 64)}
    alone, both = pack(tied), pack({**tied, "b": tied["a"]})
    assert len(both) < len(alone) + 40
    untied = pack({**tied, "b": tied["a"].clone()})
    assert len(untied) > len(alone) + 1000


@pytest.mark.parametrize("shape", [(0, 4), (0, 20, 20), (3, 0, 20, 20), (20, 20, 0)])
def test_tensors_without_numbers_keep_their_shapes(shape: tuple[int, ...]) -> None:
    after = unpack_state_dict(decode_artifact(pack({"nothing": torch.zeros(shape), "gain": torch.ones(3)})))
    assert after["nothing"].shape == shape


def test_parameters_are_packed_like_their_values() -> None:
    weight = torch.randn(32, 48)
    assert pack({"a": nn.Parameter(weight)}) == pack({"a": weight})


def test_exact_tensors_may_share_memory() -> None:
    ids = torch.arange(10)
    after = unpack_state_dict(decode_artifact(pack({"all": ids, "some": ids[:5], "column": ids.view(5, 2)[:, 1]})))
    assert torch.equal(after["some"], ids[:5])
    assert torch.equal(after["column"], ids[1::2])


def test_a_conjugate_is_not_taken_for_its_tensor() -> None:
    numbers = torch.randn(4, dtype=torch.complex64)
    state = {"a": numbers, "b": numbers.conj(), "c": numbers.imag, "d": numbers.conj().imag}
    after = unpack_state_dict(decode_artifact(pack(state)))
    assert torch.equal(after["b"], state["b"])
    assert torch.equal(after["d"], -after["c"])


def test_a_transposed_view_is_not_taken_for_its_tensor() -> None:
    square = torch.randn(32, 32)
    after = unpack_state_dict(decode_artifact(pack({"a": square, "b": square.T, "c": square[:16]})))
    for name, expected in {"a": square, "b": square.T, "c": square[:16]}.items():
        assert (after[name] - expected).abs().max() < 0.1


def test_large_and_small_dtypes() -> None:
    state = {
        "large": torch.tensor([1e6, 1.0]), "double": torch.tensor([1 / 3], dtype=torch.float64),
        "brain": torch.randn(32, 32).bfloat16(), "byte": torch.tensor([255], dtype=torch.uint8),
        "complex": torch.tensor([1 + 2j]), "empty": torch.zeros(0), "deep": torch.randn(2, 3, 16, 16),
    }  # fmt: skip
    after = unpack_state_dict(decode_artifact(pack(state)))
    assert torch.equal(after["large"], state["large"]), "float16 would make infinity of it"
    assert torch.equal(after["byte"], state["byte"])
    assert torch.equal(after["complex"], state["complex"])
    assert after["double"].item() == pytest.approx(1 / 3, rel=1e-3)
    assert after["deep"].shape == (2, 3, 16, 16)
    assert (after["deep"] - state["deep"]).abs().max() < 0.1
    assert after["empty"].shape == (0,)


@pytest.mark.parametrize("method", ["solver", "rows"])
def test_the_cap_holds_and_the_bytes_do_not_depend_on_the_order(method: str) -> None:
    state = strange().state_dict()
    data = pack(state, max_bytes=6_000, method=method, min_matrix_bits=2)
    assert pack(dict(reversed(state.items())), max_bytes=6_000, method=method, min_matrix_bits=2) == data
    with pytest.raises(ArtifactError, match="does not fit"):
        pack(state, max_bytes=500, method=method)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ArtifactError, match="w holds values that are not numbers"):
        split_state_dict({"w": torch.tensor([float("nan")])})
    with pytest.raises(ArtifactError, match="optimizer is a dict, not a tensor"):
        split_state_dict({"optimizer": {}})
    with pytest.raises(ArtifactError, match=r"stored as w\[0\], and another tensor has that name"):
        split_state_dict({"w": torch.zeros(2, 16, 16), "w[0]": torch.zeros(1)})
    with pytest.raises(ArtifactError, match=r"stored as w\[0\], and another tensor has that name"):
        split_state_dict({"w[0]": torch.zeros(1), "w": torch.zeros(2, 16, 16)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shapes", {"stack": [4, 24, 32]}), ("shapes", {"stack": [3, 24, 31]}), ("shapes", {"stack": 3}), ("shapes", None),
        ("shared", {"x": "missing"}), ("shared", [1]), ("transposed", ["x"]), ("transposed", 3),
        ("kind", "parbank language model"), ("kind", None),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_together_is_refused(key: str, value: Any) -> None:
    whole = decode_artifact(pack(strange().state_dict()))
    broken = decode_artifact(encode_artifact({**whole.meta, key: value}, whole.sections), source="x.pbk")
    with pytest.raises(ArtifactError, match=r"x\.pbk"):
        unpack_state_dict(broken)


def test_an_exact_section_that_is_no_safetensors_file_is_refused() -> None:
    whole = decode_artifact(pack(strange().state_dict()))
    for section in (b"", b"\0", b"\0garbage", b"\1garbage", b"\0" + b"\xff" * 20):
        broken = decode_artifact(encode_artifact(whole.meta, {**whole.sections, "exact": section}), source="x.pbk")
        with pytest.raises(ArtifactError, match=r"x\.pbk \(exact\)"):
            unpack_state_dict(broken)


def test_roles_of_other_people_s_names() -> None:
    for name in (
        "transformer.wte.weight", "transformer.wpe.weight", "model.embed_tokens.weight", "tok_embeddings.weight",
        "word_embeddings.weight", "gpt_neox.embed_in.weight", "embed.weight",
    ):  # fmt: skip
        assert role(name, (100, 32)) == "embedding", name
    for name in ("lm_head.weight", "embedding.projection.weight", "h.0.attn.c_attn.weight", "embed_tokens.scale"):
        assert role(name, (100, 32)) == "matrix", name
    assert role("wte.weight", (100,)) == "other"
    module = strange()
    found = roles_in(module)
    assert found["wte.weight"] == found["out.weight"] == "embedding", "a head tied to a table is the table"
    assert found["rotations"] == found["mask"] == "other"
    assert "conv.weight" not in found, "left to its name and shape"
    unnamed = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40))
    assert roles_in(unnamed) == {"0.weight": "embedding"}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tied", [True, False])
def test_parbank_s_own_tensors_keep_their_roles(recipe: str, tied: bool) -> None:
    """Their files stay the same byte for byte: this is the rule that they were written by."""
    from dataclasses import replace

    with torch.device("meta"):
        model = GPT(replace(get_recipe(recipe).model, tied=tied, value_residual=True))
    for name, tensor in model.state_dict().items():
        expected = "other"
        if tensor.ndim == 2:
            expected = (
                "embedding" if name.endswith("embedding.weight") else "matrix" if min(tensor.shape) >= 16 else "other"
            )
        assert role(name, tuple(tensor.shape)) == expected, name


class Conv1D(nn.Module):
    """The linear layer of GPT-2 in the package transformers, which is known by this name: (inputs, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 96)), nn.Parameter(torch.zeros(96))


def test_a_matrix_of_inputs_by_outputs_is_stored_transposed() -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"c_attn": Conv1D(), "conv": nn.Conv1d(32, 40, 3)})
    assert transposed_in(module) == {"c_attn.weight"}
    split = split_state_dict(module.state_dict(), roles_in(module), transposed_in(module))
    assert split.weights["c_attn.weight"].shape == (96, 32)
    assert split.weights["c_attn.weight"].data_ptr() == module["c_attn"].weight.data_ptr(), "a view, for calibration"
    packed = pack_state_dict(split, QuantConfig(), Calibration(), max_bytes=20_000)
    after = unpack_state_dict(packed.artifact)
    assert after["c_attn.weight"].shape == (32, 96)
    assert (after["c_attn.weight"] - module["c_attn"].weight).abs().max() < 0.1


def test_a_table_of_integers_under_two_names_is_kept_exactly() -> None:
    table = torch.arange(64).reshape(16, 4)
    after = unpack_state_dict(
        decode_artifact(pack({"a.weight": table, "embed.weight": table, "w": torch.randn(16, 16)}))
    )
    assert torch.equal(after["embed.weight"], table)
    assert after["a.weight"] is after["embed.weight"]


@pytest.mark.parametrize("shape", [(16, 16), (40,)])
def test_values_too_small_for_half_precision_are_kept_exactly(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    small, zero = 1e-9 * torch.randn(shape), torch.zeros(16, 16)
    after = unpack_state_dict(decode_artifact(pack({"small": small, "zero": zero, "w": torch.randn(16, 16)})))
    assert torch.equal(after["small"], small)
    assert torch.equal(after["zero"], zero)
