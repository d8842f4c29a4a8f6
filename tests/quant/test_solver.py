"""The solver's promises: under the cap and close to it, the same bytes again, and an error where nothing fits."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parbank.artifact.container import decode_artifact
from parbank.artifact.contents import pack_contents
from parbank.artifact.pack import pack_solved, pack_tensors, pack_weights, unpack_tensors
from parbank.errors import ArtifactError
from parbank.quant.bank import Contents
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig
from parbank.quant.integers import Quantised, dequantise, to_half
from parbank.quant.roles import role
from parbank.quant.solver import CannotFit, Solver


def make_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Rows of different widths and heavy tails, an embedding, and small floats."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, cols: int) -> Tensor:
        spread = torch.exp(torch.randn(rows, 1, generator=generator) / 2) / 10
        tails = 1 + torch.randn(rows, cols, generator=generator).square()
        return spread * tails * torch.randn(rows, cols, generator=generator)

    tensors = {f"blocks.{i}.up.weight": matrix(96, 64) for i in range(4)}
    tensors |= {f"blocks.{i}.down.weight": matrix(64, 96) for i in range(4)}
    return tensors | {"token_embedding.weight": matrix(200, 64), "gain": torch.rand(64, generator=generator)}


def make_calibration(tensors: dict[str, Tensor], seed: int = 0) -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    hessians, sensitivity = {}, {}
    for name, tensor in tensors.items():
        if role(name, tuple(tensor.shape)) == "other":
            continue
        rows, cols = tensor.shape
        x = torch.randn(400, cols, generator=generator) @ torch.randn(cols, cols, generator=generator)
        hessians[name] = x.T @ x / 400
        sensitivity[name] = 1e-6 * torch.exp(2 * torch.randn(rows, generator=generator))
    return Calibration(hessians=hessians, sensitivity=sensitivity, tokens=400)


TENSORS = make_tensors()
CALIBRATION = make_calibration(TENSORS)
ROLES = {name: role(name, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def build(contents: Contents) -> bytes:
    return pack_contents(contents, {name: ROLES[name] for name in contents}, {}, {})


def loss_of(weights: dict[str, Tensor]) -> float:
    """The expected loss increase of weights, from its definition."""
    total = 0.0
    for name, hessian in CALIBRATION.hessians.items():
        d = (weights[name] - TENSORS[name]).double()
        total += 0.5 * float((CALIBRATION.sensitivity[name] * ((d @ hessian.double()) * d).sum(1)).sum())
    return total


@pytest.mark.parametrize("cap", [60_000, 40_000, 25_000, 12_000])
@pytest.mark.parametrize("calibration", [CALIBRATION, Calibration()], ids=["calibrated", "weights alone"])
def test_lands_just_under_the_cap(cap: int, calibration: Calibration) -> None:
    packed = pack_solved(TENSORS, QuantConfig(), calibration, max_bytes=cap)
    assert 0.995 * cap <= packed.size <= cap
    assert len(packed.attempts) <= 8
    again = pack_solved(TENSORS, QuantConfig(), calibration, max_bytes=cap)
    assert again.data == packed.data
    assert unpack_tensors(packed.artifact).keys() == TENSORS.keys()


@settings(deadline=None, max_examples=8)
@given(cap=st.integers(1_500, 90_000))
def test_any_cap_is_kept(cap: int) -> None:
    assert pack_solved(TENSORS, QuantConfig(rotation=False), CALIBRATION, max_bytes=cap).size <= cap


def test_costs_less_than_rows_of_equal_size_and_what_it_says() -> None:
    rows = pack_tensors(TENSORS, QuantConfig(matrix_bits=4, embedding_bits=4))
    lines: list[str] = []
    solver = Solver(TENSORS, ROLES, CALIBRATION, QuantConfig(), say=lines.append)
    solved = solver.solve(build, rows.size)
    assert len(solved.data) <= rows.size
    ours = loss_of(unpack_tensors(decode_artifact(solved.data)))
    assert ours < 0.1 * loss_of(unpack_tensors(rows.artifact))
    assert ours == pytest.approx(solved.expected_loss, rel=0.1), "the damping is all that may differ"
    assert len(solved.builds) == sum("bytes of" in line for line in lines)


@pytest.mark.parametrize("rotation", [True, False])
def test_the_order_of_columns_is_a_setting(rotation: bool) -> None:
    """Either order reads back as what it costs; the file without rotation is another one by the order alone."""
    files = []
    for ordered in (True, False):
        config = QuantConfig(activation_order=ordered, rotation=rotation)
        solved = Solver(TENSORS, ROLES, CALIBRATION, config).solve(build, 25_000)
        assert loss_of(unpack_tensors(decode_artifact(solved.data))) == pytest.approx(solved.expected_loss, rel=0.1)
        files.append(solved.data)
    assert files[0] != files[1]


def test_low_rank_is_taken_where_it_pays_and_read_back() -> None:
    """Weights that are two strong directions and noise: factors are far cheaper than fine steps."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(96, 2, generator=generator), torch.randn(2, 128, generator=generator)
    tensors = {"a.weight": 5 * left @ right + 0.02 * torch.randn(96, 128, generator=generator)}
    roles = {"a.weight": "matrix"}
    solver = Solver(tensors, roles, Calibration(), QuantConfig(low_rank=2, rotation=False))
    solved = solver.solve(lambda contents: pack_contents(contents, dict.fromkeys(contents, "matrix"), {}, {}), 1_600)
    content = solved.contents["a.weight"]
    assert isinstance(content, Quantised)
    assert content.low_rank is not None
    back = unpack_tensors(decode_artifact(solved.data))["a.weight"]
    assert np.array_equal(back.numpy(), dequantise(content))
    without = Solver(tensors, roles, Calibration(), QuantConfig(rotation=False)).solve(
        lambda contents: pack_contents(contents, dict.fromkeys(contents, "matrix"), {}, {}), 1_600
    )
    plain = unpack_tensors(decode_artifact(without.data))["a.weight"]
    assert (back - tensors["a.weight"]).square().sum() < (plain - tensors["a.weight"]).square().sum()


def test_factors_that_do_not_fit_are_left_out() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(96, 2, generator=generator), torch.randn(2, 128, generator=generator)
    packed = pack_solved(
        {"a.weight": 5 * left @ right}, QuantConfig(low_rank=2, rotation=False), Calibration(), max_bytes=1_000
    )
    assert packed.size <= 1_000


def test_a_wide_cap_ends_at_the_finest_steps() -> None:
    packed = pack_solved(TENSORS, QuantConfig(), CALIBRATION, max_bytes=10_000_000)
    assert packed.size < 10_000_000
    assert len(packed.attempts) == 1
    for name, tensor in unpack_tensors(packed.artifact).items():
        assert (tensor - TENSORS[name]).abs().max() < 0.05 * TENSORS[name].abs().max()


def test_a_cap_that_cannot_be_met_names_the_smallest_size() -> None:
    with pytest.raises(ArtifactError, match=r"smallest artifact is [\d,]+ bytes"):
        pack_solved(TENSORS, QuantConfig(), CALIBRATION, max_bytes=500)


def test_the_smallest_file_is_one_of_zeros() -> None:
    zeros: dict[str, Any] = {
        name: to_half(tensor.numpy(), name=name)
        if ROLES[name] == "other"
        else Quantised(np.zeros(tensor.shape, np.int8), np.zeros((len(tensor), 1), np.float16), 1)
        for name, tensor in TENSORS.items()
    }
    smallest = len(build(zeros))
    solver = Solver(TENSORS, ROLES, CALIBRATION, QuantConfig())
    with pytest.raises(CannotFit, match=f"smallest artifact is {smallest:,} bytes") as failure:
        solver.solve(build, smallest - 1)
    assert failure.value.smallest == smallest
    assert len(solver.solve(build, smallest).data) <= smallest
    assert len(solver.solve(build, 2 * smallest).data) <= 2 * smallest


def test_code_counts() -> None:
    packed = pack_solved(TENSORS, QuantConfig(), CALIBRATION, max_bytes=40_000, code_bytes=10_000)
    assert 0.99 * 30_000 < packed.size <= 30_000


def test_rows_nobody_reads_and_zeros_cost_nothing() -> None:
    tensors = {"a.weight": torch.zeros(32, 32), "b.weight": torch.randn(32, 32)}
    calibration = Calibration(
        hessians={"a.weight": torch.zeros(32, 32), "b.weight": torch.zeros(32, 32)},
        sensitivity={"a.weight": torch.zeros(32), "b.weight": torch.zeros(32)},
        tokens=10,
    )
    packed = pack_solved(tensors, QuantConfig(), calibration, max_bytes=1_500)
    back = unpack_tensors(packed.artifact)
    assert not back["a.weight"].any()
    assert back["b.weight"].isfinite().all()


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ArtifactError, match=r"a\.weight holds values that are not finite"):
        pack_solved({"a.weight": torch.full((16, 16), torch.nan)}, QuantConfig(), Calibration(), max_bytes=9_000)


@pytest.mark.parametrize("kind", ["inputs", "gradients"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_moments_that_are_not_finite_are_refused(kind: str, value: float) -> None:
    """Gradients of NaN packed their tensor as zeros."""
    tensors = make_tensors()
    calibration = make_calibration(tensors)
    name = min(calibration.hessians)
    (calibration.hessians if kind == "inputs" else calibration.sensitivity)[name][0] = value
    with pytest.raises(ArtifactError, match=f"calibration found {kind} of {name} that are not finite"):
        Solver(tensors, ROLES, calibration, QuantConfig())


def test_an_empty_state_dict_packs() -> None:
    packed = pack_solved({}, QuantConfig(), Calibration(), max_bytes=1000)
    assert packed.data == pack_tensors({}, QuantConfig(), max_bytes=1000).data
    assert unpack_tensors(packed.artifact) == {}
    with pytest.raises(ArtifactError, match="does not fit"):
        pack_solved({}, QuantConfig(), Calibration(), max_bytes=10)


def test_it_says_when_nothing_was_calibrated() -> None:
    lines: list[str] = []
    pack_solved(TENSORS, QuantConfig(), Calibration(), max_bytes=40_000, say=lines.append)
    assert "no training text: packing by the weights alone" in lines[0]


def test_a_tensor_without_a_hessian_is_named() -> None:
    tensors = {f"blocks.{i}.weight": torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) for i in range(11)}
    seen = "blocks.10.weight"
    calibration = Calibration(hessians={seen: torch.eye(16)}, sensitivity={seen: torch.ones(16)}, tokens=5)
    lines: list[str] = []
    packed = pack_solved(tensors, QuantConfig(), calibration, max_bytes=9_000, say=lines.append)
    assert packed.uncalibrated == tuple(sorted(tensors.keys() - {seen}))
    assert lines[0].startswith("calibration found no Hessian for 10 tensors")
    assert lines[0].endswith("blocks.7.weight and 2 more")
    lines.clear()
    gain = torch.ones(16)
    whole = pack_solved(
        {seen: tensors[seen], "gain": gain}, QuantConfig(), calibration, max_bytes=9_000, say=lines.append
    )
    assert whole.uncalibrated == ()
    assert not any("Hessian" in line for line in lines)


def test_the_config_chooses_the_method() -> None:
    solved, rows = (
        pack_weights(TENSORS, QuantConfig(method=method), CALIBRATION, max_bytes=40_000).data  # type: ignore[arg-type]
        for method in ("solver", "rows")
    )
    assert solved == pack_solved(TENSORS, QuantConfig(), CALIBRATION, max_bytes=40_000).data
    assert rows == pack_tensors(TENSORS, QuantConfig(method="rows"), max_bytes=40_000).data
