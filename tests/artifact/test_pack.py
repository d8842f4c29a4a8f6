"""Packing: names, shapes and values come back, the cap holds, and a file that is not whole is never half-loaded."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from parbank.artifact.container import Artifact, decode_artifact, encode_artifact, read_artifact
from parbank.artifact.contents import TABLE, pack_contents
from parbank.artifact.pack import describe_tensors, pack_tensors, unpack_tensors
from parbank.artifact.streams import encode_bytes
from parbank.errors import ArtifactError
from parbank.quant.config import QuantConfig
from parbank.quant.integers import Quantised, dequantise, quantise_rows
from parbank.quant.roles import role

META = {"kind": "model", "config": {"layers": 2}}
EXTRA = {"tokenizer": b"pieces of words" * 20}


def model(seed: int = 0, width: int = 64) -> dict[str, torch.Tensor]:
    """A small state dict with every kind of tensor the model has."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    tensors = {"token_embedding.weight": draw(100, width), "bigram.embedding.weight": draw(50, 8)}
    for layer in range(2):
        tensors[f"blocks.{layer}.attention.query.weight"] = draw(width, width)
        tensors[f"blocks.{layer}.attention.key.weight"] = draw(width // 2, width)
        tensors[f"blocks.{layer}.mlp.up.weight"] = draw(3 * width, width)
        tensors[f"blocks.{layer}.attention.gain"] = 1 + draw(4)
        tensors[f"blocks.{layer}.mix"] = draw(2, width)
    return {**tensors, "scale": torch.tensor(1.5), "none": torch.empty(0, 3), "cube": draw(3, 20, 20)}


def test_roles_follow_name_and_shape():
    assert role("token_embedding.weight", (1024, 512)) == "embedding"
    assert role("bigram.embedding.weight", (1536, 8)) == "embedding"
    assert role("value_embedding.embedding.weight", (1024, 128)) == "embedding"
    assert role("head.weight", (1024, 512)) == "matrix"
    assert role("blocks.3.attention.query.weight", (16, 16)) == "matrix"
    assert role("blocks.3.attention.gate.weight", (8, 512)) == "other"
    assert role("blocks.3.gain", (512,)) == "other"
    assert role("scale", ()) == "other"
    assert role("bank", (4, 64, 64)) == "other"


def test_what_comes_back_is_what_the_codecs_give():
    tensors, config = model(), QuantConfig()
    back = unpack_tensors(pack_tensors(tensors, config, meta=META, extra_sections=EXTRA).artifact)
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == torch.float32
        assert back[name].shape == tensor.shape
        kind = role(name, tuple(tensor.shape))
        if kind == "other":
            expected = tensor.half().float()
        else:
            q = config.matrix_q if kind == "matrix" else config.embedding_q
            expected = torch.from_numpy(dequantise(quantise_rows(tensor.numpy(), q, config.clip_fractions)))
        assert torch.equal(back[name], expected), name
        assert tensor.numel() == 0 or (back[name] - tensor).abs().max() < 0.02


def test_file_holds_meta_and_extra_sections(tmp_path: Path):
    packed = pack_tensors(model(), QuantConfig(), meta=META, extra_sections=EXTRA)
    size = packed.write(tmp_path / "model.pbk")
    artifact = read_artifact(tmp_path / "model.pbk")
    assert size == packed.size == artifact.size == (tmp_path / "model.pbk").stat().st_size
    assert artifact.meta == META
    assert artifact.sections["tokenizer"] == EXTRA["tokenizer"]
    for name, tensor in unpack_tensors(artifact).items():
        assert torch.equal(tensor, unpack_tensors(packed.artifact)[name])


def test_packing_is_deterministic_whatever_the_order_layout_or_dtype():
    tensors, config = model(), QuantConfig()
    first = pack_tensors(tensors, config, meta=META, extra_sections=EXTRA).data
    shuffled = dict(reversed(tensors.items()))
    strided = {name: t.t().contiguous().t() if t.ndim == 2 else t for name, t in tensors.items()}
    doubled = {name: torch.nn.Parameter(t.double()) for name, t in tensors.items()}
    for same in (shuffled, strided, doubled):
        assert pack_tensors(same, config, meta=META, extra_sections=EXTRA).data == first


@pytest.mark.parametrize("bits", range(2, 9))
def test_all_bit_widths_round_trip(bits: int):
    config = QuantConfig(matrix_bits=bits, min_matrix_bits=2, embedding_bits=bits)
    packed = pack_tensors(model(), config)
    assert packed.matrix_q == 2 ** (bits - 1) - 1
    back = unpack_tensors(packed.artifact)
    assert back["blocks.0.mlp.up.weight"].shape == (192, 64)
    assert {row.bits for row in packed.rows if row.role != "other"} == {bits}


def test_no_cap_and_a_loose_cap_use_the_configured_bits():
    for cap in (None, 10**9):
        packed = pack_tensors(model(), QuantConfig(), max_bytes=cap)
        assert (packed.matrix_q, packed.clipped, packed.attempts) == (31, True, ((31, packed.size),))


def test_a_tight_cap_gets_the_finest_range_that_fits():
    tensors = model(width=96)
    everything = {q: pack_tensors_at(tensors, q).size for q in range(7, 32)}
    assert sorted(everything.values()) == list(everything.values())
    for cap in (everything[31], everything[30] - 1, everything[20], everything[12] + 5, everything[7]):
        packed = pack_tensors(tensors, QuantConfig(), max_bytes=cap)
        assert packed.size <= cap
        assert packed.matrix_q == max(q for q, size in everything.items() if size <= cap)
        assert not packed.clipped
        assert len(packed.attempts) <= 8
        assert (packed.matrix_q, packed.size) in packed.attempts
        rows = {row.name: row for row in packed.rows}
        assert rows["blocks.0.mlp.up.weight"].q == packed.matrix_q
        assert rows["token_embedding.weight"].q == 127


def pack_tensors_at(tensors, q: int):
    """Every rung of the ladder, built without a search: what the search is held against."""
    from parbank.artifact.pack import Packed, _Packer

    return Packed(_Packer(tensors, QuantConfig(), {}, {}).build(q, clip=False), q, False, ())


def test_weights_far_from_gaussian_still_find_the_finest_range():
    """Mostly zeros: the size hardly follows log2(q), so the guesses miss and halving must finish."""
    tensors = {
        "up.weight": torch.where(torch.rand(128, 128, generator=torch.Generator().manual_seed(0)) < 0.03, 1.0, 0.0)
    }
    tensors["up.weight"] *= torch.randn(128, 128, generator=torch.Generator().manual_seed(1))
    sizes = {q: pack_tensors_at(tensors, q).size for q in range(7, 32)}
    cap = sorted(sizes.values())[2]
    packed = pack_tensors(tensors, QuantConfig(), max_bytes=cap)
    assert packed.size <= cap
    assert len(packed.attempts) <= 9


def test_code_counts_against_the_cap():
    tensors = model()
    size = pack_tensors(tensors, QuantConfig()).size
    assert pack_tensors(tensors, QuantConfig(), max_bytes=size + 500, code_bytes=500).matrix_q == 31
    packed = pack_tensors(tensors, QuantConfig(), max_bytes=size + 500, code_bytes=501)
    assert packed.size + 501 <= size + 500


def test_a_cap_out_of_reach_names_the_smallest_size():
    tensors = model()
    smallest = pack_tensors_at(tensors, 7).size
    with pytest.raises(ArtifactError, match=f"{smallest:,} bytes plus 9 bytes of code.*min_matrix_bits"):
        pack_tensors(tensors, QuantConfig(), max_bytes=smallest + 8, code_bytes=9)
    with pytest.raises(ArtifactError, match=r"does not fit.*--max-bytes"):
        pack_tensors({"gain": torch.ones(5000)}, QuantConfig(), max_bytes=100)


def test_tensors_that_cannot_be_packed_are_named():
    for bad, reason in [
        (torch.full((20, 20), torch.nan), "not finite"),
        (torch.full((5,), torch.inf), "float16"),
        (torch.full((20, 20), 1e300, dtype=torch.float64), "not finite"),
        (torch.zeros(3, dtype=torch.int64), "int64"),
    ]:
        with pytest.raises(ArtifactError, match=rf"blocks\.1\.bad.*{reason}"):
            pack_tensors({**model(), "blocks.1.bad": bad}, QuantConfig())


def test_a_table_too_long_to_read_back_is_refused_by_the_writer():
    with pytest.raises(ArtifactError, match="names of the tensors"):
        pack_tensors({"x" * (1 << 20): torch.ones(1)}, QuantConfig())


def test_factors_of_nothing_for_large_matrices_are_refused_by_the_writer():
    """A reader would have to take them for a bomb."""
    factors = np.zeros((1024, 256), np.float16), np.zeros((256, 2048), np.float16)
    content = Quantised(np.zeros((1024, 2048), np.int8), np.zeros((1024, 1), np.float16), 1, 0, factors)
    with pytest.raises(ArtifactError, match="low-rank factors"):
        pack_contents({"a": content}, {"a": "matrix"}, {}, {})


def test_extra_sections_stay_out_of_the_weights():
    with pytest.raises(ArtifactError, match="collides"):
        pack_tensors(model(), QuantConfig(), extra_sections={"weights/more": b""})


def test_rows_account_for_every_byte_of_the_weights():
    tensors = model()
    packed = pack_tensors(tensors, QuantConfig(), meta=META, extra_sections=EXTRA)
    rows, sizes = packed.rows, packed.artifact.sizes
    assert [row.name for row in rows] == sorted(tensors)
    streams = sum(size for name, size in sizes.items() if name.startswith("weights/") and name != TABLE)
    assert streams - 32 < sum(row.packed_bytes for row in rows) <= streams
    up = next(row for row in rows if row.name == "blocks.0.mlp.up.weight")
    assert (up.shape, up.count, up.bits, up.levels, up.role) == ((192, 64), 12288, 6, 63, "matrix")
    assert up.raw_bytes == 12288 * 6 // 8 + 2 * 192
    assert 4 < up.bits_per_weight < 6.5


def test_a_model_of_zeros_packs():
    tensors = {name: torch.zeros_like(tensor) for name, tensor in model().items()}
    packed = pack_tensors(tensors, QuantConfig())
    assert all(not tensor.any() for tensor in unpack_tensors(packed.artifact).values())
    assert packed.size < 2500
    assert len(packed.rows) == len(tensors)


def test_an_empty_state_dict_packs():
    assert unpack_tensors(pack_tensors({}, QuantConfig()).artifact) == {}


def test_an_artifact_without_weights_is_refused():
    with pytest.raises(ArtifactError, match=r"notes\.pbk holds no weights"):
        unpack_tensors(decode_artifact(encode_artifact({}, {"tokenizer": b""}), source="notes.pbk"))


def _with_table(artifact: Artifact, table: object) -> Artifact:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return Artifact(artifact.meta, {**artifact.sections, TABLE: encode_bytes(text)}, "evil.pbk")


def test_tables_that_do_not_match_the_streams_are_refused():
    """A hostile writer gets every checksum right: what remains are the checks of the weights themselves."""
    artifact = pack_tensors({"a": torch.randn(32, 32), "b": torch.randn(7)}, QuantConfig()).artifact
    good = [["a", [32, 32], "matrix", 31, 1, 0, 0], ["b", [7], "other", 0, 1, 0, 0]]
    assert set(unpack_tensors(_with_table(artifact, good))) == {"a", "b"}
    first, second = good
    for bad in [
        [first],
        [second],
        [second, first],
        [first, first, second],
        [["a", [32, 33], "matrix", 31, 1, 0, 0], second],
        [["a", [1024, 1], "matrix", 31, 1, 0, 0], second],
        [["a", [32, 32], "matrix", 30, 1, 0, 0], second],
        [["a", [32, 32], "matrix", 128, 1, 0, 0], second],
        [["a", [32, 32], "matrix", -31, 1, 0, 0], second],
        [["a", [32, 32], "pickle", 31, 1, 0, 0], second],
        [["a", [2**39, 2**39], "matrix", 31, 1, 0, 0], second],
        [["a", [-32, -32], "matrix", 31, 1, 0, 0], second],
        [["a", [32, 32, 1], "matrix", 31, 1, 0, 0], second],
        [["a", [32.0, 32], "matrix", 31, 1, 0, 0], second],
        [first, ["b", [8], "other", 0, 1, 0, 0]],
        [first, ["b", [2**39] * 8, "other", 0, 1, 0, 0]],
        [first, ["b", [1] * 1000, "other", 0, 1, 0, 0]],
        [first, ["b", "7", "other", 0, 1, 0, 0]],
        [first, [["b"], [7], "other", 0, 1, 0, 0]],
        [first, ["b", [7], "other"]],
        [first[:4], second[:4]],
        [[*first[:4], 3, 0, 0], second],
        [[*first[:4], 0, 0, 0], second],
        [[*first[:4], 1, 3, 0], second],
        [[*first[:4], 1, 64, 0], second],
        [[*first[:4], 1, -2, 0], second],
        [[*first[:4], 1, 0, 33], second],
        [[*first[:4], 1, 0, 1], second],
        [[*first[:4], 32, 0, 0], second],
        [first, [*second[:4], 2, 0, 0]],
        [first, [*second[:4], 1, 0, 1]],
        {"a": 1},
        "abcd",
        7,
        None,
        json.dumps([*good, *([f"c{i:09}", [0], "other", 0, 1, 0, 0] for i in range(50_000))]).encode(),
        b"\xff not json",
        b"[" * 100_000,
    ]:
        with pytest.raises(ArtifactError, match=r"evil\.pbk"):
            unpack_tensors(_with_table(artifact, bad))
        with pytest.raises(ArtifactError, match=r"evil\.pbk"):
            describe_tensors(_with_table(artifact, bad))


def test_damage_behind_a_right_checksum_is_refused_or_decodes_whole():
    """Any byte of any weight section changed: an error, or all tensors with finite values, never something between."""
    artifact = pack_tensors({"a": torch.randn(20, 20), "b": torch.randn(5)}, QuantConfig()).artifact
    rng = np.random.default_rng(0)
    for name, data in artifact.sections.items():
        for index in rng.choice(len(data), min(len(data), 60), replace=False):
            damaged = bytearray(data)
            damaged[index] ^= int(rng.integers(1, 256))
            try:
                tensors = unpack_tensors(Artifact({}, {**artifact.sections, name: bytes(damaged)}, "evil.pbk"))
            except ArtifactError:
                continue
            assert len(tensors) == 2
            assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


# Written by the first release: every later one must read it to the same numbers. `_first_weights` made it, with
# QuantConfig(matrix_bits=4, clip_steps=1) and meta {"kind": "model"}.
VERSION_1 = base64.b85decode(
    b"iBLjI4GJ0x0RR912m$~AD#>`I?PhDOARazh`rC(Qdm?RRbYUVodm?LTZe$`lB5iMEWo#mSEFyDdV{~b6ZgV0!TYDm7Xk}w-b9HSZIwCPSH#0"
    b"ReHeoq7F)(E?WMw%rVKq5qWnyMxG&N;1VqzjJB5q-AWg<EvcV%g3XmoQgbYWs_Wg;vhZ)Rq5WppAsFf1Z-X?kTMIx#RbeJpz-V`yb#YjbsNB"
    b"03^4H8?djIA%9DH!?V7WjQrDG&wV4H83(ZH#ufzH#agOEFx}UZDk@lB6nqJXJ~YDFKKRcWoKn_b1yd{EFy1aW^-k9B04cJG%O->X?kTMIyf<"
    b"XEPEnjXk}w-b9HSZIwCbNFk?9|GcY$}F)?E>GB`G2HD+QsVmUZ6H8V3eH8CPAB5q-AWg<EvcV%g3XmoQgX>N37XJvA8FEKJVA}k_rW@d9`bR"
    b"s%2I5jLHb7^{IB04vHEPEnjXk}w-b9HSZIwE5;V_`UCVPY{eWM(!nGBY+ZV>Mx8VL32kH8NyjH8CPAB5q-AWg<EvcV%g3XmoQgb7Ns_Wpg4d"
    b"B5!79b7gcQIx#siEFyDhdSxOyGd6uJdm>|KWn*h|b!{R#A~<1TH!(6WHf1zsWivE0HDhKpIAS$pGC4CdVPs=5I3g?}ZeeX@B03^>Woc(<baO"
    b"9eY;R$7F*YJBB5!79b7gcQIx;diEFyDhdSxOyH+@}w0pI|40ABzAE#ZKKPw575%#T(%y>=&<VOdZddi9gpUq^O)S*e+*tr90g?L4CPs0yPR$"
    b"K>!Zi?`{w1v;`EE8DXhFZ>RxT%<_G%@mt>9-jt_T&jk9SN48vTz>Mx3v^P|TI2Qr0pI|C07w7;C5DEN7(bO2U{(f!R`TdS*ZrTPXjtB@b}M{"
    b"`QI$6Ag?05iZw0~UycoAI=DG-(7sX|^+Y-`m*cV#SIL7aImn5eAG#)<y00IDBy#6Ag0pI{502=@R668>UjZ0=QRwIhL`#y@XmF?fTQ6uy%@O"
    b"l6M00000Jh(I"
)


def _first_weights() -> dict[str, torch.Tensor]:
    weights = (torch.arange(16 * 16).reshape(16, 16) * 37 % 101 - 50).float() / 64
    gain = torch.tensor([1.0, -0.5, 0.25])
    return {"blocks.0.mlp.up.weight": weights, "coarse.embedding.weight": weights[:2, :3].clone(), "gain": gain}


def test_version_1_stays_readable():
    artifact = decode_artifact(VERSION_1)
    assert artifact.meta == {"kind": "model"}
    config, tensors = QuantConfig(matrix_bits=4, clip_steps=1), unpack_tensors(artifact)
    assert list(tensors) == list(_first_weights())
    for name, weights in _first_weights().items():
        q = {"matrix": config.matrix_q, "embedding": config.embedding_q, "other": 0}[role(name, tuple(weights.shape))]
        expected = dequantise(quantise_rows(weights.numpy(), q)) if q else weights.numpy()
        assert np.array_equal(tensors[name].numpy(), expected)
