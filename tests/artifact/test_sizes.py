"""The budget: a bound that no weights exceed, an estimate that is near, and a refusal that says what would fit."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.artifact.container import decode_artifact
from parbank.artifact.pack import describe_tensors, pack_solved, pack_tensors, unpack_tensors
from parbank.artifact.sizes import check_fits, expected_bytes, overhead_bytes, worst_case_bytes
from parbank.errors import ConfigError
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig

META = {"kind": "model", "config": {"layers": 2}}
EXTRA = {"tokenizer": bytes(range(256)) * 4}
SHAPES = {
    "token_embedding.weight": (128, 64),
    "blocks.0.attention.query.weight": (64, 64),
    "blocks.0.mlp.up.weight": (768, 128),
    "blocks.0.gain": (64,),
    "scale": (),
}


def uniform_integers(shape: tuple[int, ...], q: int) -> torch.Tensor:
    """The worst case itself: every integer of the range equally often, so that nothing can be compressed."""
    values = torch.randint(-q, q + 1, shape).float()
    if len(shape) == 2:
        values[:, :1] = q
        values *= 2.0 ** torch.randint(-8, 4, (shape[0], 1))
    return values


FILLS = {
    "uniform": lambda shape, q: torch.rand(shape) * 2 - 1,
    "gaussian": lambda shape, q: torch.randn(shape) * 0.02,
    "adversarial": uniform_integers,
    "scattered": lambda shape, q: torch.randn(shape) * 10 ** (torch.rand(shape) * 8 - 6),
    "zeros": lambda shape, q: torch.zeros(shape),
    "constant": lambda shape, q: torch.full(shape, 0.3),
}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_no_weights_exceed_the_worst_case(fill: str, bits: int):
    torch.manual_seed(0)
    config = QuantConfig(method="rows", min_matrix_bits=bits, matrix_bits=max(bits, 6))
    bound = worst_case_bytes(SHAPES, config, overhead=overhead_bytes(META, EXTRA))
    tensors = {name: FILLS[fill](shape, config.min_matrix_q) for name, shape in SHAPES.items()}
    packed = pack_tensors(tensors, config, max_bytes=bound, meta=META, extra_sections=EXTRA)
    assert packed.size <= bound


def test_the_bound_is_close_to_the_worst_weights():
    torch.manual_seed(0)
    config = QuantConfig(method="rows", matrix_bits=4, clip_steps=1)
    shapes = {"up.weight": (512, 512), "token_embedding.weight": (256, 128)}
    bound = worst_case_bytes(shapes, config, overhead=overhead_bytes(META, EXTRA))
    tensors = {name: uniform_integers(shape, 127 if "emb" in name else 7) for name, shape in shapes.items()}
    packed = pack_tensors(tensors, config, meta=META, extra_sections=EXTRA)
    assert 0.97 * bound < packed.size <= bound


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.dictionaries(
        st.sampled_from(["embedding.weight", "a.weight", "b.weight", "é\n" * 40]) | st.text(max_size=30),
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
        max_size=6,
    ),
    fill=st.sampled_from(sorted(FILLS)),
    bits=st.integers(2, 8),
    embedding_bits=st.integers(2, 8),
    seed=st.integers(0, 1000),
)
def test_a_model_that_passes_the_check_always_packs(shapes, fill, bits, embedding_bits, seed):
    torch.manual_seed(seed)
    config = QuantConfig(method="rows", matrix_bits=8, min_matrix_bits=bits, embedding_bits=embedding_bits)
    cap = worst_case_bytes(shapes, config, overhead=overhead_bytes(META, EXTRA)) + 100
    check_fits(shapes, config, cap, overhead=overhead_bytes(META, EXTRA), code_bytes=100)
    tensors = {n: FILLS[fill](s, config.min_matrix_q).nan_to_num().clamp(-6e4, 6e4) for n, s in shapes.items()}
    packed = pack_tensors(tensors, config, max_bytes=cap, meta=META, extra_sections=EXTRA, code_bytes=100)
    assert packed.size + 100 <= cap


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_the_expected_size_is_near_for_gaussian_weights(bits: int):
    torch.manual_seed(0)
    shapes = {
        "up.weight": (1024, 256),
        "down.weight": (256, 1024),
        "token_embedding.weight": (256, 256),
        "gain": (256,),
    }
    config = QuantConfig(matrix_bits=bits, min_matrix_bits=4, clip_steps=1)
    expected = expected_bytes(shapes, config, overhead=overhead_bytes(META, EXTRA))
    tensors = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    packed = pack_tensors(tensors, config, meta=META, extra_sections=EXTRA)
    assert packed.size == pytest.approx(expected, rel=0.03)


def test_the_check_refuses_with_numbers_and_remedies():
    config = QuantConfig(method="rows")
    worst = worst_case_bytes(SHAPES, config, overhead=5000)
    check_fits(SHAPES, config, worst, overhead=5000)
    with pytest.raises(ConfigError, match=rf"may need {worst + 1:,}.*--max-bytes.*min_matrix_bits") as caught:
        check_fits(SHAPES, config, worst, overhead=5000, code_bytes=1)
    assert "110,657 parameters" in str(caught.value)
    assert f"at least {worst + 1:,}" in str(caught.value)
    with pytest.raises(ConfigError, match="about 0 parameters"):
        check_fits(SHAPES, config, 4000, overhead=5000)


def test_the_number_of_parameters_said_to_fit_does_fit():
    config, overhead, cap = QuantConfig(method="rows"), 5000, 2_000_000

    def shapes(layers: int) -> dict[str, tuple[int, ...]]:
        return {f"blocks.{i}.mlp.up.weight": (1024, 512) for i in range(layers)}

    with pytest.raises(ConfigError) as caught:
        check_fits(shapes(20), config, cap, overhead=overhead)
    said = int(re.search(r"about ([\d,]+) parameters", str(caught.value))[1].replace(",", ""))
    layers = said // (1024 * 512)
    check_fits(shapes(layers), config, cap, overhead=overhead)
    with pytest.raises(ConfigError):
        check_fits(shapes(layers + 1), config, cap, overhead=overhead)


ANY = {
    "noise": lambda shape: 0.02 * torch.randn(shape),
    "uniform": lambda shape: 2 * torch.rand(shape) - 1,
    "heavy tails": lambda shape: (torch.randn(shape) / torch.randn(shape)).clamp(-6e4, 6e4),
    "orders of magnitude": lambda shape: (torch.randn(shape) * 10 ** (8 * torch.rand(shape) - 4)).clamp(-6e4, 6e4),
    "all equal": lambda shape: torch.full(shape, 0.3),
    "largest of float16": lambda shape: 65504 * torch.randn(shape).sign(),
    "too small for float16": lambda shape: 1e-30 * torch.randn(shape),
    "outlier": lambda shape: torch.where(torch.arange(shape[-1] if shape else 1) == 0, 3e4, 0.01 * torch.randn(shape)),
}
# the second has more weights than a reader believes without a byte for every 64
SOLVED_SHAPES = [SHAPES, {"up.weight": (8200, 128), "token_embedding.weight": (32, 128), "gain": (8,)}]


def solve(shapes: dict[str, tuple[int, ...]], fill: str, cap: int, config: QuantConfig) -> int:
    tensors = {name: ANY[fill](shape).reshape(shape) for name, shape in shapes.items()}
    packed = pack_solved(tensors, config, Calibration(), max_bytes=cap, meta=META, extra_sections=EXTRA, code_bytes=100)
    found = unpack_tensors(packed.artifact)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
    return packed.size + 100


@pytest.mark.parametrize("fill", ANY)
@pytest.mark.parametrize("shapes", SOLVED_SHAPES, ids=["small", "more than a million"])
def test_whatever_the_weights_the_solver_meets_the_smallest_cap_that_is_taken(shapes, fill: str):
    torch.manual_seed(0)
    config, overhead = QuantConfig(max_builds=4), overhead_bytes(META, EXTRA)
    cap = worst_case_bytes(shapes, config, overhead=overhead) + 100
    check_fits(shapes, config, cap, overhead=overhead, code_bytes=100)
    with pytest.raises(ConfigError, match=rf"it may need {cap:,} even with .*raise --max-bytes \(at least {cap:,}\)"):
        check_fits(shapes, config, cap - 1, overhead=overhead, code_bytes=100)
    assert solve(shapes, fill, cap, config) <= cap


@settings(max_examples=15, deadline=None)
@given(
    shapes=st.dictionaries(
        st.sampled_from(["embedding.weight", "a.weight", "b.weight"]) | st.text(max_size=30),
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
        min_size=1,
        max_size=4,
    ),
    fill=st.sampled_from(sorted(ANY)),
    coder=st.sampled_from(["ans", "lzma"]),
    low_rank=st.sampled_from([0, 2]),
    builds=st.integers(2, 4),
    seed=st.integers(0, 1000),
)
def test_what_the_solver_was_promised_to_meet_it_meets(shapes, fill, coder, low_rank, builds, seed):
    torch.manual_seed(seed)
    config = QuantConfig(coder=coder, low_rank=low_rank, max_builds=builds)
    cap = worst_case_bytes(shapes, config, overhead=overhead_bytes(META, EXTRA)) + 100
    assert solve(shapes, fill, cap, config) <= cap


def test_what_may_still_come_is_not_refused_but_has_room_in_the_cap_that_is_named():
    worst = worst_case_bytes(SHAPES, QuantConfig(), overhead=5000)
    check_fits(SHAPES, QuantConfig(), worst, overhead=5000, reserve=700)
    with pytest.raises(ConfigError, match=rf"may need {worst:,}.*at least {worst + 700:,}"):
        check_fits(SHAPES, QuantConfig(), worst - 1, overhead=5000, reserve=700)


@pytest.mark.parametrize("method", ["solver", "rows"])
def test_a_huge_model_is_refused_where_the_rest_of_the_file_is_too_large(method: Any) -> None:
    with pytest.raises(ConfigError, match=r"promised to fit 1,000 bytes: .*, 2,000 of them besides the weights"):
        check_fits({"a.weight": (20_000, 20_000)}, QuantConfig(method=method), 1000, overhead=2000)


def test_the_golf_model_fits_its_caps():
    shapes: dict[str, tuple[int, ...]] = {"token_embedding.weight": (1024, 512), "bigram.embedding.weight": (1536, 128)}
    for layer in range(11):
        for name, rows in (("query", 512), ("key", 256), ("value", 256), ("out", 512)):
            shapes[f"blocks.{layer}.attention.{name}.weight"] = (rows, 512)
        shapes[f"blocks.{layer}.mlp.up.weight"] = (1536, 512)
        shapes[f"blocks.{layer}.mlp.down.weight"] = (512, 1536)
    rows = QuantConfig(method="rows")
    check_fits(shapes, rows, 16_000_000, overhead=30_000, code_bytes=100_000)
    check_fits(shapes, QuantConfig(method="rows", min_matrix_bits=2), 8_000_000, overhead=30_000)
    with pytest.raises(ConfigError, match=r"quant\.method=solver"):
        check_fits(shapes, rows, 8_000_000, overhead=30_000)
    for cap in (16_000_000, 8_000_000, 4_000_000):
        check_fits(shapes, QuantConfig(), cap, overhead=30_000, code_bytes=100_000)
    assert 17e6 < expected_bytes(shapes, QuantConfig(), overhead=30_000) < 19e6


@pytest.mark.parametrize(
    "wrong",
    [
        {"matrix_bits": 9},
        {"matrix_bits": 1, "min_matrix_bits": 1},
        {"embedding_bits": 0},
        {"matrix_bits": 4, "min_matrix_bits": 5},
        {"clip_steps": 0},
        {"clip_floor": 0.0},
        {"clip_floor": 1.5},
    ],
)
def test_settings_are_checked(wrong):
    with pytest.raises(ConfigError, match=r"quant\."):
        QuantConfig(**wrong)


def test_clip_points_run_from_one_to_the_floor():
    fractions = QuantConfig(clip_steps=4, clip_floor=0.7).clip_fractions
    assert fractions == pytest.approx((1.0, 0.9, 0.8, 0.7))
    assert QuantConfig(clip_steps=1).clip_fractions == (1.0,)


@pytest.mark.parametrize("group", [0, 8, 24])
@pytest.mark.parametrize("scales", ["float16", "exponent"])
def test_groups_and_exponents_keep_the_promise_and_come_back(group: int, scales: Any) -> None:
    generator = torch.Generator().manual_seed(group)
    shapes = {"a.weight": (40, 48), "token_embedding.weight": (32, 24), "b.weight": (24, 20), "gain": (7,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    config = QuantConfig(method="rows", group=group, scales=scales, clip_deviations=4.0)
    bound = worst_case_bytes(shapes, config, overhead=overhead_bytes({}, {}))
    packed = pack_tensors(tensors, config, max_bytes=bound)
    assert packed.size <= bound
    artifact = decode_artifact(packed.data)
    found = {row.name: row for row in describe_tensors(artifact)}
    assert ("6 scales a row" in found["a.weight"].extras) == (group == 8)
    assert found["b.weight"].extras == "", "20 columns are not divided by 8 or 24"
    for name, tensor in unpack_tensors(artifact).items():
        assert (tensor - tensors[name]).square().mean().sqrt() < 0.08
